"""plan.py as the process that it is: its answers, its command line, and programs that fail."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import unittest
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import ClassVar
from unittest import mock

from mcp import Client

from forge.bundle import bundle
from forge.parts.assembly.rig import AssembledRig
from forge.parts.boundaries import plan_program as part
from forge.parts.boundaries.plan_program import asked_plan
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.geometry import Geometry
from forge.parts.knowledge.memory import WEIGHT_ENCODINGS
from forge.parts.knowledge.models import GEMMA4
from forge.parts.knowledge.plan_answer import (
    OwnModel,
    PlanAnswer,
    PlannedChange,
    PlannedDeployment,
    PlanQuestion,
    question_of,
)
from forge.parts.knowledge.planner_answers import (
    PLANNED_ENGINES,
    PLANNED_HARDWARE,
    plan_answer,
)
from forge.parts.toolsets.planning import DeploymentOutcome, PlanningToolset
from forge.parts.toolsets.serving import ServingToolset
from forge.parts.toolsets.work import JobsToolset
from forge.programs.plan import plan_text
from forge.rigs.local_pytorch_cpu_2b import RIG
from forge.suites.witness import rig_processes
from tests.rig_folder import RigFolderCase
from tests.rig_programs import write_programs

ROOT = Path(__file__).resolve().parents[2]
FITS = PlanQuestion("E2B", "v6e1", "vllm", context=65_536, streams=8)
HARD = PlanQuestion("31B", "v6e1", "vllm", settings=("MAX_MODEL_LEN",))
SOFT = PlanQuestion("E4B", "v6e1", "vllm", context=16_384, streams=64)
SMALL = Geometry(
    layer_types=("full_attention",) * 3,
    hidden=64,
    intermediate=128,
    heads=4,
    kv_heads=2,
    global_kv_heads=2,
    head_dim=16,
    global_head_dim=16,
    vocab=1000,
)


def planned(answer: PlanAnswer) -> PlannedDeployment:
    assert answer.plan is not None, answer
    return answer.plan


class ProgramCase(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        write_programs(self.folder)
        self.program = self.folder / "plan.py"

    async def asyncSetUp(self) -> None:
        # unittest runs the loop in debug mode, which reports every slow step on standard error.
        asyncio.get_running_loop().slow_callback_duration = 60

    async def refused(self, question: PlanQuestion = FITS) -> RigError:
        with self.assertRaises(RigError) as caught:
            await asked_plan(self.program, question)
        return caught.exception


class TestAnswers(ProgramCase):
    async def test_the_process_says_what_the_function_says(self) -> None:
        for question in (
            FITS,
            HARD,
            SOFT,
            replace(FITS, usd_per_hour=1.35, provisioning="flex-start", api_input=0.0),
            replace(FITS, cold_start_s=7.5, cold_start_day="2026-11-30", output=1),
            replace(FITS, model="google/gemma-4-E2B-it-qat-w4a16-ct", kv_dtype="fp8"),
            PlanQuestion("2b", "cpu", "pytorch", memory_gib=7.5, physical_gib=16.0),
        ):
            with self.subTest(question.model, hardware=question.hardware):
                self.assertEqual(await asked_plan(self.program, question), plan_answer(question))

    async def test_an_answer_keeps_its_types_over_the_wire(self) -> None:
        answer = await asked_plan(self.program, SOFT)
        self.assertIsInstance(answer.plan, PlannedDeployment)
        self.assertIsInstance(planned(answer).changes[0], PlannedChange)
        self.assertIsInstance(planned(answer).reasons, tuple)
        assert answer.refusal is not None
        self.assertIs(answer.refusal.hard, False)

    async def test_a_model_that_is_in_no_table_goes_by_its_shape(self) -> None:
        for stored, counted in (("f32", "f32"), ("q4_1", "q4_0"), ("q8_0", "bf16"), ("", "bf16")):
            question = PlanQuestion("/m/tiny", "cpu", "pytorch", own=OwnModel(SMALL, stored))
            question = replace(question, memory_gib=4.0)
            answer = await asked_plan(self.program, question)
            self.assertEqual(answer, plan_answer(question))
            self.assertIn(f"/m/tiny in {counted} on cpu", planned(answer).summary)
            self.assertLess(planned(answer).memory_bytes["weights, all"], 1e6)

    async def test_a_question_survives_json_and_a_stranger_s_key_does_not_pass(self) -> None:
        question = replace(FITS, own=OwnModel(SMALL, "bf16"), settings=("PORT", "DTYPE"))
        told = json.loads(json.dumps(asdict(question)))
        self.assertEqual(question_of(told), question)
        self.assertEqual(set(told), {field.name for field in fields(PlanQuestion)})
        for change in ({"gpu": 1}, {"own": {}}, {"own": {"geometry": {}, "stored": ""}}):
            with self.subTest(change), self.assertRaises((TypeError, KeyError)):
                question_of(told | change)
        with self.assertRaises(ValueError):
            shape = asdict(SMALL) | {"layer_types": ["odd"]}
            question_of(told | {"own": {"geometry": shape, "stored": "bf16"}})

    async def test_a_question_s_own_fault_is_raised_as_the_tool_shows_it(self) -> None:
        for change, words in (
            ({"hardware": "moon"}, "hardware: must be one of v5e1"),
            ({"hardware": ""}, "hardware: must be one of v5e1"),
            ({"engine": "tgi"}, "engine: must be one of vllm"),
            ({"model": "nobody/nothing"}, "model: is in no table; sizes: E2B, E4B"),
            ({"model": "-x; touch P"}, "model: must be "),
            ({"model": "embedded"}, "model: is in no table"),
            ({"engine": "llamacpp"}, "known there: vllm"),
            ({"encoding": "nf4"}, "encoding 'nf4' is not known"),
            ({"kv_dtype": "fp4"}, "kv_dtype 'fp4' is not known"),
            ({"output": 65_537}, "output 65537 must be 1 to the context"),
            ({"context": 0}, "output 128 must be 1 to the context"),
            ({"hardware": "inf2", "model": "12B"}, "no engine 'vllm' is known for inf2"),
        ):
            with self.subTest(change):
                error = await self.refused(replace(FITS, **change))
                self.assertEqual(error.error_class, "INVALID")
                self.assertIn(words, error.what)
        self.assertNotIn("touch", (await self.refused(replace(FITS, model="-x; touch P"))).what)

    async def test_the_refusal_speaks_in_the_settings_that_the_asker_has(self) -> None:
        question = PlanQuestion("12B", "cpu", "pytorch", memory_gib=24.0, physical_gib=24.0)
        bare, speaking = [
            await asked_plan(self.program, replace(question, settings=keys))
            for keys in ((), ("MAX_MODEL_LEN", "KV_CACHE_DTYPE"))
        ]
        assert bare.refusal is not None and speaking.refusal is not None
        self.assertNotIn("MAX_MODEL_LEN", bare.refusal.next_step)
        self.assertRegex(speaking.refusal.next_step, r"set MAX_MODEL_LEN=\d+")
        self.assertEqual(bare.refusal.what, speaking.refusal.what)
        self.assertIn("text weights", bare.refusal.what)
        hard = await asked_plan(self.program, HARD)
        assert hard.refusal is not None
        self.assertTrue(hard.refusal.hard)
        self.assertNotIn("override=true", hard.refusal.next_step)
        self.assertIsNone((await asked_plan(self.program, FITS)).refusal)

    def test_the_tool_shows_every_field_of_a_plan(self) -> None:
        shown = set(DeploymentOutcome.model_fields)
        told = {field.name for field in fields(PlannedDeployment)}
        self.assertEqual(shown - told, {"next_step"})
        self.assertEqual(told - shown, set())


class TestFaults(ProgramCase):
    async def test_a_missing_program_is_named(self) -> None:
        self.program.unlink()
        error = await self.refused()
        self.assertEqual(error.error_class, "NOT_FOUND")
        self.assertIn("plan.py", error.what)
        self.assertIn("restore", error.next_step)

    async def test_a_program_that_answers_nonsense_is_no_answer(self) -> None:
        good = asdict(plan_answer(FITS))
        wrong_class = {"plan": None, "fault": {"error_class": "ODD", "what": "x", "next_step": ""}}
        for text in (
            "",
            "print('{}')",
            "print('[1]')",
            "print('{' * 100_000)",
            "print('x' * 3_000_000)",
            f"print({json.dumps(wrong_class)!r})",
            f"print({json.dumps(good | {'plan': {'fits': True}})!r})",
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "import sys; sys.exit('broken in two')",
        ):
            with self.subTest(text[:60]):
                self.program.write_text(text)
                error = await self.refused()
                self.assertEqual(error.error_class, "INTERNAL")
                self.assertIn("plan.py gave no answer", error.what)
        self.assertIn("broken in two", error.what)

    async def test_one_that_does_not_end_is_ended(self) -> None:
        pid_file = self.folder / "pid"
        self.program.write_text(
            "import os, pathlib, time\n"
            f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
            "time.sleep(600)\n"
        )
        with mock.patch.object(part, "_PLAN_PATIENCE_S", 1.0):
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
        self.program.write_text(
            "import pathlib, sys\n"
            f"pathlib.Path({str(told)!r}).write_text(repr(sys.argv[1:]))\n"
            f"print({json.dumps(asdict(plan_answer(FITS)))!r})\n"
        )
        await asked_plan(
            self.program, replace(FITS, own=OwnModel(SMALL, "bf16"), model="/models/x")
        )
        self.assertEqual(told.read_text(), "['--question']")


class TestCommand(unittest.TestCase):
    """The bundled file, alone in a folder, with an interpreter that sees no installed package."""

    folder: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        source = bundle("forge.programs.plan", ROOT)
        assert not source.third_party, source.third_party
        (cls.folder / "plan.py").write_text(source.render("# built for a test\n"))

    def run_it(self, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "plan.py", *words],
            cwd=self.folder,
            input=given,
            capture_output=True,
            text=True,
        )
        self.assertNotIn("Traceback", done.stderr)
        return done

    def plan_words(self, question: PlanQuestion) -> list[str]:
        return [
            *("--model", question.model, "--hardware", question.hardware),
            *("--engine", question.engine, "--context", str(question.context)),
            *("--streams", str(question.streams)),
        ]

    def test_the_status_says_whether_it_fits(self) -> None:
        for question, status in ((FITS, 0), (SOFT, 1), (HARD, 1)):
            done = self.run_it(*self.plan_words(question))
            self.assertEqual(done.returncode, status, done.stderr)
            self.assertEqual(done.stdout, plan_text(planned(plan_answer(question))) + "\n")
            self.assertEqual(done.stderr, "")

    def test_people_get_the_verdict_every_summand_and_a_command_that_fits(self) -> None:
        plan = planned(plan_answer(SOFT))
        told = self.run_it(*self.plan_words(SOFT)).stdout
        for words in (plan.summary, "refused by an estimate", *plan.reasons, *plan.assumptions):
            self.assertIn(words, told)
        for name, size in plan.memory_bytes.items():
            shown = f"{size:,} bytes" if "one more" in name else f"{size / 1e9:.2f}"
            self.assertRegex(told, rf"(?m)^ [= ] {name} +{shown}$")
        for name, rate in plan.tokens_per_s.items():
            self.assertIn(f"{rate:,.1f}", told, name)
        for name, usd in plan.usd.items():
            self.assertRegex(told, rf"(?m)^   {name} +{usd:,.4f}$")
        for change in plan.changes:
            self.assertIn(f"  {change.words}\n", told)
        command = told.partition("as in: ")[2].partition("\n")[0]
        python, program, *words = shlex.split(command)
        self.assertEqual((python, program), ("python3", "plan.py"))
        self.assertEqual(self.run_it(*words).returncode, 0, command)

    def test_what_is_not_known_is_said_and_not_made_up(self) -> None:
        told = self.run_it("--model", "31B", "--hardware", "h100", "--engine", "vllm").stdout
        self.assertIn("first answer: unmeasured", told)
        self.assertNotIn("USD\n", told)
        hopeless = ["--model", "31B", "--hardware", "cpu", "--engine", "pytorch"]
        done = self.run_it(*hopeless, "--memory-gib", "1", "--context", "262144", "--streams", "99")
        self.assertEqual(done.returncode, 1)
        self.assertIn("  no single change\n", done.stdout)

    def test_several_devices_share(self) -> None:
        told = self.run_it("--model", "31B", "--hardware", "v6e4", "--engine", "vllm").stdout
        self.assertIn("memory of each of 4 devices", told)

    def test_json_is_the_answer_that_the_server_reads(self) -> None:
        answer = json.loads(self.run_it(*self.plan_words(SOFT), "--json").stdout)
        self.assertEqual(answer, json.loads(json.dumps(asdict(plan_answer(SOFT)))))
        done = self.run_it("--question", given=json.dumps(asdict(SOFT)))
        self.assertEqual((json.loads(done.stdout), done.returncode), (answer, 1))
        fault = self.run_it("--question", given=json.dumps(asdict(replace(SOFT, engine="x"))))
        self.assertEqual(fault.returncode, 2)
        self.assertEqual(json.loads(fault.stdout)["fault"]["error_class"], "INVALID")

    def test_what_is_no_question_is_refused(self) -> None:
        own = {"geometry": asdict(SMALL) | {"heads": "x"}, "stored": "bf16"}
        for given in (
            "",
            "null",
            "[]",
            "{}",
            "[" * 60_000,
            '{"model": "E2B"',
            json.dumps(asdict(FITS) | {"odd": 1}),
            json.dumps(asdict(FITS) | {"own": 5}),
            json.dumps(asdict(FITS) | {"own": own}),
            json.dumps(asdict(FITS) | {"model": "x" * 300_000}),
        ):
            with self.subTest(given[:50]):
                done = self.run_it("--question", given=given)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertIn("no question", done.stderr)

    def test_wrong_usage_is_status_2_and_says_what(self) -> None:
        good = self.plan_words(FITS)
        for words, said in (
            ([], "missing: --model, --hardware, --engine"),
            (good[2:], "missing: --model"),
            ([*good, "--colour"], "--colour"),
            ([*good, "--context", "0"], "must be 1 to 262144"),
            ([*good, "--streams", "many"], "many"),
            ([*good, "--encoding", "nf4"], "nf4"),
            ([*good, "--memory-gib", "nan"], "must be 0 to 4096"),
            ([*good, "--memory-gib", "-1"], "must be 0 to 4096"),
            ([*good, "--price-per-hour", "inf"], "must be 0 to 10000"),
            ([*good, "--provisioning", "gratis"], "gratis"),
            ([*good, "--hardware", "moon"], "hardware: must be one of v5e1"),
            ([*good, "--model", "nobody/nothing"], "model: is in no table"),
            ([*good, "--engine", "llamacpp"], "known there: vllm"),
        ):
            with self.subTest(words[-2:]):
                done = self.run_it(*words)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertIn(said, done.stderr)

    def test_the_help_names_all_that_can_be_asked_and_the_status(self) -> None:
        done = self.run_it("--help")
        self.assertEqual(done.returncode, 0)
        told = " ".join(done.stdout.split())
        for name in (*GEMMA4, *PLANNED_HARDWARE, *PLANNED_ENGINES, *WEIGHT_ENCODINGS):
            self.assertIn(name, told)
        self.assertIn("0 it fits, 1 it does not, 2 wrong usage", told)

    def test_flags_reach_the_plan(self) -> None:
        def plan(*words: str) -> dict[str, object]:
            done = self.run_it(*self.plan_words(FITS), *words, "--json")
            return dict(json.loads(done.stdout)["plan"])

        plain = plan()
        for words in (
            ("--kv-dtype", "fp8"),
            ("--encoding", "w4a16"),
            ("--output", "4096"),
            ("--utilization", "0.5"),
            ("--memory-gib", "16"),
            ("--price-per-hour", "1"),
            ("--provisioning", "spot"),
            ("--api-input-price", "9"),
            ("--api-output-price", "9"),
        ):
            with self.subTest(words):
                self.assertNotEqual(plan(*words), plain)
        cuda = [*self.plan_words(replace(FITS, hardware="mi300x")), "--json"]
        texts = [
            self.run_it(*cuda, "--batched-tokens", tokens).stdout for tokens in ("8192", "16384")
        ]
        self.assertNotEqual(*texts)


class TestInTheRig(RigFolderCase):
    """A rig whose plan.py is missing or broken says so, and serves nothing unplanned."""

    settings = {"MODEL_NAME": "google/gemma-4-E2B-it"}

    async def called(self, tool: str) -> str:
        rig = replace(RIG, toolsets=(ServingToolset, JobsToolset, PlanningToolset))
        assembled: AssembledRig = self.assembled(rig)
        async with Client(assembled.server()) as client:
            result = await client.call_tool(tool, {})
        self.assertTrue(result.is_error, result.structured_content)
        self.assertEqual(assembled.context.jobs.all(), [])
        self.assertEqual(rig_processes(self.folder / "STATE"), [])
        return str(getattr(result.content[0], "text", ""))

    async def test_a_missing_planner_is_named_by_every_tool_that_needs_it(self) -> None:
        for tool in ("plan_deployment", "serve_model"):
            text = await self.called(tool)
            self.assertTrue(text.startswith("NOT_FOUND plan.py is not beside server.py"), text)

    async def test_a_broken_planner_lets_nothing_pass(self) -> None:
        (self.folder / "plan.py").write_text("import sys; sys.exit('no tables')\n")
        for tool in ("plan_deployment", "serve_model"):
            text = await self.called(tool)
            self.assertTrue(text.startswith("INTERNAL plan.py gave no answer: no tables"), text)


class TestTheCut(unittest.TestCase):
    """The arithmetic and its tables stand in plan.py and in no server."""

    def test_a_server_has_no_planner_in_it(self) -> None:
        server = bundle("forge.rigs.local_pytorch_cpu_2b", ROOT).render("# x\n")
        program = bundle("forge.programs.plan", ROOT).render("# x\n")
        for line in ("def plan_of(", "def fit_verdict(", "ENGINE_PROFILES: ", "PRICES: "):
            self.assertIn(f"\n{line}", program)
            self.assertNotIn(f"\n{line}", server)


if __name__ == "__main__":
    unittest.main()
