"""probe_capabilities through a real client: the job, its report, the baseline, and every end.

The model is scripted and listens in this process; server, jobs and files are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from mcp import Client, StdioServerParameters
from pydantic import ValidationError

from forge.parts.assembly.rig import AssembledRig
from forge.parts.knowledge.probe_report import ProbeFinding, ProbeReport, differing_probe_facts
from tests.probing_rig import KEY_SOURCE, PROBING_SERVER, probing_rig, write_probe_program
from tests.rig_programs import write_programs
from tests.scripted_model import ScriptedModel

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
EVERYTHING = {
    "tool_one_call",
    "tool_right_of_two",
    "tool_none_needed",
    "tool_two_parallel",
    "tool_missing_argument",
    "schema_thinking_off",
    "schema_thinking_on",
    "vision_picture",
    "greedy_repeats",
    "context_at_limit",
    "context_above_limit",
}


class ProbingCase(unittest.IsolatedAsyncioTestCase):
    model: ScriptedModel

    @classmethod
    def setUpClass(cls) -> None:
        cls.model = cls.enterClassContext(ScriptedModel())

    def setUp(self) -> None:
        place = Path(self.enterContext(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        self.folder = place / "rig"
        self.folder.mkdir()
        (self.folder / "server.py").write_text(PROBING_SERVER)
        write_programs(self.folder)
        write_probe_program(self.folder)
        self.serve()
        environment = {
            **os.environ,
            "XDG_STATE_HOME": str(place / "state"),
            "XDG_CACHE_HOME": str(place / "cache"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        for name in ("ENGINE_PORT", "DTYPE", "MAX_MODEL_LEN"):
            environment.pop(name, None)
        self.enterContext(mock.patch.dict(os.environ, environment, clear=True))
        self.rig = AssembledRig(probing_rig(), self.folder / "server.py")
        self.state = self.rig.context.paths.state
        self.addCleanup(self.end_workers)
        self.model.obey(context_limit=4096)

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().slow_callback_duration = PATIENCE_S  # a busy machine is no news

    def serve(self, port: int | None = None, **settings: Any) -> None:
        known = {"ENGINE_PORT": self.model.port if port is None else port, **settings}
        lines = "".join(f"{key}={value}\n" for key, value in known.items())
        (self.folder / "tpu.env").write_text(lines)

    def end_workers(self) -> None:
        for job in self.rig.context.jobs.all():
            if not job.finished and job.worker_pid:
                psutil.Process(job.worker_pid).kill()

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[Client]:
        async with Client(self.rig.server(), **options) as client:
            yield client

    async def called(self, client: Client, tool: str, /, **arguments: Any) -> dict[str, Any]:
        result = await client.call_tool(tool, arguments)
        if result.is_error:
            raise AssertionError(result.content[0].text)
        assert result.structured_content is not None
        return dict(result.structured_content)

    async def refused(self, client: Client, tool: str, /, **arguments: Any) -> str:
        result = await client.call_tool(tool, arguments)
        self.assertTrue(result.is_error, result.structured_content)
        return str(result.content[0].text)

    async def finished(self, client: Client, job_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            job = await self.called(client, "get_job", job_id=job_id, wait_s=20)
            if job["state"] not in ("queued", "running"):
                return job
        self.fail("the job did not end")

    async def probed(self, client: Client, **arguments: Any) -> dict[str, Any]:
        """A whole probe; the finished job."""
        begun = await self.called(client, "probe_capabilities", **arguments)
        return await self.finished(client, begun["job_id"])

    async def until(self, condition: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.assertLess(time.monotonic(), deadline)
            await asyncio.sleep(0.05)

    def texts(self) -> dict[Path, str]:
        """What stands in the state's files, less those that a running job takes away meanwhile."""
        found = {}
        for path in self.state.rglob("*"):
            with contextlib.suppress(OSError):
                found[path] = path.read_text(errors="replace")
        return found

    def report(self, name: str) -> ProbeReport:
        path = self.state / "benchmarks" / "probes" / f"{name}.json"
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
        return ProbeReport.model_validate_json(path.read_bytes())

    async def stuck(self, client: Client) -> str:
        """A probe that has judged the five tools and hangs in the first schema; its id."""
        self.model.obey(context_limit=4096, pause_s=60, pause_at="about the sea")
        begun = await self.called(client, "probe_capabilities", baseline="")
        job_id = str(begun["job_id"])
        read = self.rig.context.jobs.read
        await self.until(lambda: len(read(job_id).result.get("verdicts", {})) == 5)
        await self.until(lambda: any("response_format" in body for body in self.model.seen))
        return job_id

    def program_of(self, job_id: str) -> psutil.Process:
        """The probe.py of a job that runs."""
        worker = psutil.Process(self.rig.context.jobs.read(job_id).worker_pid)
        return next(c for c in worker.children() if any("probe.py" in w for w in c.cmdline()))

    async def ended(self, process: psutil.Process) -> None:
        await self.until(
            lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        )


class WholeProbeTest(ProbingCase):
    async def test_everything_passes_in_both_protocol_modes(self) -> None:
        names = []
        for options in ({}, {"mode": "legacy"}):
            heard: list[tuple[float, str | None]] = []

            async def hear(progress: float, _total: float | None, message: str | None) -> None:
                heard.append((progress, message))  # noqa: B023

            async with self.client(**options) as client:
                result = await client.call_tool(
                    "probe_capabilities", {"wait_s": 50}, progress_callback=hear
                )
                outcome = result.structured_content or {}
                self.assertFalse(result.is_error, outcome)
                job = await self.finished(client, outcome["job_id"])
            shares = [share for share, _ in heard]
            self.assertEqual((shares, shares[-1]), (sorted(set(shares)), 100))
            self.assertEqual(job["state"], "done", job)
            self.assertEqual(set(job["result"]["verdicts"]), EVERYTHING)
            self.assertEqual(job["result"]["counts"], {"pass": len(EVERYTHING)}, job["result"])
            self.assertEqual(outcome["verdicts"], job["result"]["verdicts"])
            self.assertEqual(len(outcome["table"]), len(EVERYTHING))
            text = str(result.content[0].text)
            self.assertTrue(all(case in text for case in EVERYTHING), text)
            names.append(job["result"]["report"])
        self.assertEqual(len(set(names)), 2)
        report = self.report(names[0])
        self.assertEqual(report.run.state, "complete")
        self.assertEqual((report.context_limit, report.limit_source), (4096, "MAX_MODEL_LEN"))
        self.assertEqual((report.engine.name, report.hardware.slot), ("pytorch", "cpu"))
        self.assertEqual(report.engine.server, self.rig.context.version)
        self.assertEqual(report.settings["probe.py"], self.rig.context.version_of("probe.py"))
        self.assertEqual(report.settings["DTYPE"], "bfloat16")
        self.assertEqual(len(report.greedy), 6)
        for finding in report.findings:
            self.assertGreaterEqual(len(finding.evidence), 1, finding.case)
            self.assertTrue(all(json.loads(e.request) for e in finding.evidence[:1]))
        self.assertEqual(list((self.state / "probes").iterdir()), [])

    async def test_a_server_that_drops_everything_is_silent_throughout(self) -> None:
        self.model.obey(
            tools="dropped", schema="dropped", picture="dropped", above="taken", context_limit=4096
        )
        async with self.client() as client:
            job = await self.probed(client)
        silent = EVERYTHING - {"greedy_repeats", "context_at_limit"}
        verdicts = job["result"]["verdicts"]
        self.assertEqual({c for c, v in verdicts.items() if v == "silent"}, silent, job["result"])

    async def test_only_the_cases_that_were_asked_for(self) -> None:
        async with self.client() as client:
            job = await self.probed(client, cases=["vision", "schema"])
        self.assertEqual(
            list(job["result"]["verdicts"]),
            ["schema_thinking_off", "schema_thinking_on", "vision_picture"],
        )
        self.assertFalse(any("tools" in body for body in self.model.seen))

    async def test_the_servers_own_word_on_limit_and_sight_comes_first(self) -> None:
        self.model.obey(context_limit=600, limit_listed=True, modalities=["text"])
        async with self.client() as client:
            job = await self.probed(client, cases=["context", "vision"])
        verdicts = job["result"]["verdicts"]
        self.assertEqual(verdicts["context_at_limit"], "pass", job["result"])
        self.assertEqual(verdicts["context_above_limit"], "pass", job["result"])
        self.assertEqual(verdicts["vision_picture"], "untested")
        self.assertEqual(self.report(job["result"]["report"]).context_limit, 600)
        self.model.obey(context_limit=600, modalities=["text", "image"])
        async with self.client() as client:
            job = await self.probed(client, cases=["vision"])
        self.assertEqual(job["result"]["verdicts"], {"vision_picture": "pass"})

    async def test_a_checkout_gets_the_report_as_well(self) -> None:
        (self.folder / ".git").mkdir()
        async with self.client() as client:
            job = await self.probed(client, cases=["vision"])
        path = self.folder / "benchmarks" / "probes" / f"{job['result']['report']}.json"
        self.assertEqual(str(path), job["result"]["report_file"])
        self.assertEqual(ProbeReport.model_validate_json(path.read_bytes()), self.report(path.stem))


class BaselineTest(ProbingCase):
    async def compared(self, client: Client, baseline: str, **conduct: Any) -> dict[str, Any]:
        self.model.obey(context_limit=4096, **conduct)
        job = await self.probed(client, cases=["determinism"], baseline=baseline)
        self.assertEqual(job["state"], "done", job)
        return dict(job["result"])

    async def test_against_the_same_and_another_build(self) -> None:
        async with self.client() as client:
            first = await self.compared(client, "")
            self.assertEqual(first["verdicts"], {"greedy_repeats": "pass"})
            same = await self.compared(client, first["report"])
            self.serve(DTYPE="float32")
            other = await self.compared(client, first["report"], build="2")
            unsteady = await self.compared(client, first["report"], greedy="varies")
        verdicts = [r["verdicts"]["greedy_baseline"] for r in (same, other, unsteady)]
        self.assertEqual(verdicts, ["pass", "fail", "untested"])
        self.assertEqual(self.report(same["report"]).baseline, first["report"])
        line = next(line for line in other["table"] if line.startswith("greedy_baseline"))
        self.assertIn("0 of 6", line)
        # What else is not the same stands beside it.
        self.assertIn("float32", line)

    async def test_a_baseline_that_cannot_serve(self) -> None:
        async with self.client() as client:
            blind = (await self.probed(client, cases=["vision"]))["result"]["report"]
            result = await self.compared(client, blind)
            self.assertEqual(result["verdicts"]["greedy_baseline"], "untested")
            first = (await self.compared(client, ""))["report"]
            path = self.state / "benchmarks" / "probes" / f"{first}.json"
            changed = json.loads(path.read_text())
            changed["subject"]["model"] = "google/gemma-4-E2B-it"
            path.write_text(json.dumps(changed))
            result = await self.compared(client, first)
            self.assertEqual(result["verdicts"]["greedy_baseline"], "untested")
            path.write_text("{}")
            asked = len(self.rig.context.jobs.all())
            text = await self.refused(client, "probe_capabilities", baseline=first)
            self.assertTrue(text.startswith("PARTIAL "), text)
            self.assertEqual(len(self.rig.context.jobs.all()), asked)


class RefusalTest(ProbingCase):
    BAD: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("INVALID", "cases", {"cases": []}),
        ("INVALID", "cases", {"cases": ["everything"]}),
        ("INVALID", "cases", {"cases": ["tools"] * 6}),
        ("INVALID", "baseline", {"baseline": "../../etc/passwd"}),
        ("INVALID", "baseline", {"baseline": "-x"}),
        ("INVALID", "baseline", {"baseline": "a" * 10_000}),
        ("INVALID", "baseline", {"baseline": "2026-01-01-small-vllm-cpu", "cases": ["tools"]}),
        ("NOT_FOUND", "2026-01-01-small-vllm-cpu", {"baseline": "2026-01-01-small-vllm-cpu"}),
        ("INVALID", "timeout_s", {"timeout_s": 0}),
        ("INVALID", "timeout_s", {"timeout_s": "nan"}),
        ("INVALID", "endpoint", {"endpoint": "http://example.com"}),
    )

    async def test_bad_input_is_refused_by_name_and_nothing_starts(self) -> None:
        async with self.client() as client:
            for word, name, arguments in self.BAD:
                with self.subTest(arguments=arguments):
                    text = await self.refused(client, "probe_capabilities", **arguments)
                    self.assertTrue(text.startswith(f"{word} "), text)
                    self.assertIn(name, text)
        self.assertEqual(self.rig.context.jobs.all(), [])
        self.assertEqual(self.model.seen, [])

    async def test_nothing_is_served(self) -> None:
        self.serve(0)
        self.rig = AssembledRig(probing_rig(), self.folder / "server.py")
        async with self.client() as client:
            text = await self.refused(client, "probe_capabilities")
        self.assertTrue(text.startswith("NOT_FOUND "), text)

    async def test_a_server_without_a_plain_answer_gets_no_report(self) -> None:
        async with self.client() as client:
            for change in ("error", "html"):
                self.model.obey(plain=change)
                job = await self.probed(client)
                self.assertEqual(job["state"], "failed", job)
                self.assertTrue(job["error"].startswith("UNREACHABLE "), job["error"])
        self.assertFalse((self.state / "benchmarks").exists())

    async def test_a_folder_without_the_program_is_named_before_anything_starts(self) -> None:
        (self.folder / "probe.py").unlink()
        async with self.client() as client:
            text = await self.refused(client, "probe_capabilities")
        self.assertTrue(text.startswith("NOT_FOUND ") and "probe.py" in text, text)
        self.assertEqual((self.rig.context.jobs.all(), self.model.seen), ([], []))

    async def test_one_probe_at_a_time(self) -> None:
        async with self.client() as client:
            job_id = await self.stuck(client)
            text = await self.refused(client, "probe_capabilities")
            await self.called(client, "cancel_job", job_id=job_id)
        self.assertTrue(text.startswith("BUSY ") and job_id in text, text)

    async def test_read_only(self) -> None:
        self.serve(RIG_READ_ONLY=1)
        async with self.client() as client:
            text = await self.refused(client, "probe_capabilities")
        self.assertTrue(text.startswith("DENIED "), text)
        self.assertEqual(self.model.seen, [])


class BrokenProbeTest(ProbingCase):
    """Whoever is ended, what was found is kept, and what was not asked is untested."""

    def check_partial(self, name: str, state: str) -> None:
        report = self.report(name)
        self.assertEqual(report.run.state, state)
        verdicts = {finding.case: finding.verdict for finding in report.findings}
        self.assertEqual(set(verdicts), EVERYTHING)
        details = {finding.case: finding.detail for finding in report.findings}
        self.assertIn(f"{state} in the middle of it", details["schema_thinking_off"])
        self.assertIn(f"{state} before its turn", details["schema_thinking_on"])
        for case, verdict in verdicts.items():
            self.assertEqual(verdict, "pass" if case.startswith("tool_") else "untested", case)

    async def test_cancel(self) -> None:
        async with self.client() as client:
            job_id = await self.stuck(client)
            program = self.program_of(job_id)
            done = await self.called(client, "cancel_job", job_id=job_id)
        await self.ended(program)
        self.assertEqual(done["state"], "cancelled")
        self.check_partial(done["result"]["report"], "cancelled")
        self.assertEqual(list((self.state / "probes").iterdir()), [])

    async def test_the_worker_is_killed(self) -> None:
        async with self.client() as client:
            job_id = await self.stuck(client)
            worker = psutil.Process(self.rig.context.jobs.read(job_id).worker_pid)
            program = self.program_of(job_id)
            worker.kill()
            await self.ended(worker)
            await self.ended(program)  # nobody is left to read what it tells
            lost = await self.called(client, "get_job", job_id=job_id)
            self.assertEqual((lost["state"], len(lost["result"]["verdicts"])), ("lost", 5))
            self.model.obey(context_limit=4096)
            again = await self.called(client, "probe_capabilities", cases=["vision"])
            self.assertEqual(len(again["notes"]), 1, again)
            self.assertIn(job_id, again["notes"][0])
            await self.finished(client, again["job_id"])
            third = await self.called(client, "probe_capabilities", cases=["vision"])
            self.assertEqual(third["notes"], [])
            await self.finished(client, third["job_id"])
        names = sorted(p.stem for p in (self.state / "benchmarks" / "probes").iterdir())
        self.assertEqual(len(names), 3)
        self.check_partial(min(names, key=len), "killed")

    async def test_the_cut_case_keeps_its_evidence(self) -> None:
        self.model.obey(context_limit=4096, pause_s=60, pause_at="by bicycle")
        async with self.client() as client:
            begun = await self.called(client, "probe_capabilities", cases=["determinism"])
            await self.until(lambda: len(self.model.seen) > 3)
            done = await self.called(client, "cancel_job", job_id=begun["job_id"])
        (finding,) = self.report(done["result"]["report"]).findings
        self.assertEqual((finding.case, finding.verdict), ("greedy_repeats", "untested"))
        asked = ["explanation, first time", "code, first time"]
        self.assertEqual([exchange.what for exchange in finding.evidence], asked)

    async def test_a_probe_that_is_cancelled_before_its_first_answer_leaves_nothing(self) -> None:
        self.model.obey(pause_s=60)
        async with self.client() as client:
            begun = await self.called(client, "probe_capabilities")
            await self.until(lambda: self.model.seen)
            done = await self.called(client, "cancel_job", job_id=begun["job_id"])
        self.assertEqual((done["state"], done["result"]), ("cancelled", {}))
        self.assertFalse((self.state / "benchmarks").exists())
        self.assertEqual(list((self.state / "probes").iterdir()), [])

    async def test_the_program_is_killed(self) -> None:
        async with self.client() as client:
            job_id = await self.stuck(client)
            self.program_of(job_id).kill()
            job = await self.finished(client, job_id)
        self.assertEqual(job["state"], "failed")
        name = job["result"]["report"]
        self.assertTrue(job["error"].startswith("PARTIAL probe.py ended with status -9"), job)
        self.assertIn(name, job["error"])
        self.check_partial(name, "killed")
        self.assertEqual(list((self.state / "probes").iterdir()), [])

    async def test_a_program_that_fails_at_once_leaves_no_report(self) -> None:
        for text, words in (
            ("import sys; sys.exit('broken in two')", "broken in two"),
            ("raise ValueError('odd')", "ValueError: odd"),
            ("", "ended early"),
        ):
            with self.subTest(text):
                (self.folder / "probe.py").write_text(text)
                async with self.client() as client:
                    job = await self.probed(client)
                self.assertEqual((job["state"], job["result"]), ("failed", {}))
                self.assertTrue(job["error"].startswith("PARTIAL "), job["error"])
                self.assertIn(words, job["error"])
                self.assertIn("kept: nothing", job["error"])
        self.assertFalse((self.state / "benchmarks").exists())
        self.assertEqual(list((self.state / "probes").iterdir()), [])

    async def test_what_a_killed_run_left_damaged_is_told_once(self) -> None:
        runs = self.state / "probes"
        runs.mkdir(parents=True)
        names = [f"probe-20260101-000000-aaaaa{n}" for n in range(5)]
        (runs / f"{names[0]}.json").write_text('{"findings": []}')  # a draft of an older build
        for name in names[1:]:
            (runs / name).mkdir()
        (runs / names[2] / "plan.json").write_text("{broken")
        plan = {"base_url": "http://127.0.0.1:1", "model": "m", "cases": ["x"], "timeout_s": 1}
        answered = {"what": "w", "request": "r", "status": 200, "answer": "a", "seconds": 1}
        events = [
            {"event": "begun", "case": "vision_picture"},
            {"event": "answered", "case": "vision_picture", "exchange": answered},
        ]
        for name, head in ((names[3], {"run": {}}), (names[4], {})):
            (runs / name / "plan.json").write_text(json.dumps(plan))
            (runs / name / "frame.json").write_text(json.dumps({"head": head}))
            lines = "".join(f"{json.dumps(event)}\n" for event in events)
            (runs / name / "events.jsonl").write_text(lines)
        async with self.client() as client:
            begun = await self.called(client, "probe_capabilities", cases=["vision"])
            job = await self.finished(client, begun["job_id"])
        self.assertEqual(len(begun["notes"]), len(names), begun)
        for name, note in zip(names, sorted(begun["notes"]), strict=True):
            self.assertIn(f"{name} left nothing usable", note)
        self.assertEqual(job["result"]["counts"], {"pass": 1})
        self.assertEqual(list(runs.iterdir()), [])

    async def test_a_key_is_in_no_argument_no_file_and_no_evidence(self) -> None:
        key = "plain words of no known shape 0123456789"
        self.enterContext(mock.patch.dict(os.environ, {KEY_SOURCE: key}))
        async with self.client() as client:
            job_id = await self.stuck(client)
            program = self.program_of(job_id)
            self.assertEqual(program.environ()["RIG_MODEL_API_KEY"], key)
            self.assertNotIn(key, " ".join(program.cmdline()))
            texts = self.texts()
            self.assertTrue(any(path.name == "plan.json" for path in texts))
            self.assertEqual([path for path, text in texts.items() if key in text], [])
            for path in (self.state / "probes" / job_id).iterdir():
                self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600, path)
            await self.called(client, "cancel_job", job_id=job_id)

    async def test_a_report_names_no_path_no_address_and_no_key(self) -> None:
        secret = "sk-" + "a1" * 20
        self.enterContext(mock.patch.dict(os.environ, {"SCRIPTED_API_KEY": secret}))
        words = f"see {self.folder}/x.py on 203.0.113.7 with {secret}"
        body = {"error": {"message": f"tools are not supported: {words}"}}
        plain = self.model.body_of
        self.model.body_of = lambda r: body if r.calls else plain(r)  # type: ignore[method-assign]
        self.addCleanup(delattr, self.model, "body_of")
        async with self.client() as client:
            job = await self.probed(client, cases=["tools"])
        name = job["result"]["report"]
        self.assertEqual(job["result"]["verdicts"]["tool_one_call"], "unsupported", job)
        everything = self.report(name).model_dump_json()
        for word in (secret, str(self.folder), "203.0.113.7"):
            self.assertNotIn(word, everything)
        self.assertNotIn(secret, json.dumps(job))


class ProcessTest(ProbingCase):
    async def test_over_stdio(self) -> None:
        parameters = StdioServerParameters(
            command=sys.executable,
            args=[str(self.folder / "server.py")],
            env=dict(os.environ),
            cwd=str(self.folder),
        )
        async with Client(parameters) as client:
            begun = await self.called(client, "probe_capabilities", cases=["schema"])
        # The client and its server are gone; the job goes on, and the next server finds it.
        async with self.client() as client:
            job = await self.finished(client, begun["job_id"])
        self.assertEqual(job["result"]["counts"], {"pass": 2}, job)

    def test_a_list_from_the_command_line(self) -> None:
        argv = [sys.executable, "server.py", "call", "probe_capabilities", 'cases=["vision"]']
        done = subprocess.run(
            [*argv, "wait_s=50", "--json"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["verdicts"], {"vision_picture": "pass"})


class DifferenceTest(unittest.TestCase):
    def test_only_what_differs_is_named_and_the_port_is_not(self) -> None:
        def report(day: int, argv: list[str], **settings: str) -> ProbeReport:
            finding = {"case": "greedy_repeats", "group": "determinism", "verdict": "untested"}
            return ProbeReport.model_validate(
                {
                    "run": {"id": f"2026-01-0{day}-small-vllm-l4", "date": f"2026-01-0{day}"},
                    "subject": {"model": "a/b", "short": "small", "encoding": "bf16"},
                    "hardware": {"slot": "l4", "chip": "l4"},
                    "engine": {"name": "vllm", "argv": argv},
                    "settings": settings,
                    "findings": [{**finding, "detail": "-"}],
                }
            )

        same = ["serve", "m", "--async", "--seqs", "8"]
        then = report(1, [*same, "--kv-cache-dtype", "auto", "--port", "8000"], DTYPE="x")
        now = report(2, [*same, "--kv-cache-dtype", "fp8", "--port", "8001"], DTYPE="x")
        self.assertEqual(
            differing_probe_facts(now, then),
            ["argv '--kv-cache-dtype auto' then '--kv-cache-dtype fp8'"],
        )
        self.assertEqual(differing_probe_facts(now, now), [])


class SchemaTest(unittest.TestCase):
    def test_a_verdict_needs_evidence_and_known_words(self) -> None:
        good = {"case": "tool_one_call", "group": "tools", "verdict": "untested", "detail": "-"}
        ProbeFinding.model_validate(good)
        for change in (
            {"verdict": "pass"},
            {"verdict": "maybe"},
            {"group": "audio"},
            {"detail": ""},
            {"case": "Tool"},
            {"remark": "x"},
        ):
            with self.subTest(change=change), self.assertRaises(ValidationError):
                ProbeFinding.model_validate({**good, **change})


if __name__ == "__main__":
    unittest.main()
