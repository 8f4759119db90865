"""run_benchmark through a real client: the job, its processes, the report, and every way to end.

The model server is scripted and in a process of its own; jobs and load generators are real.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
import unittest
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from mcp import Client

from forge.parts.assembly.rig import AssembledRig
from forge.parts.boundaries.load_plan import LoadCellPlan, LoadPlan
from forge.parts.knowledge.report_schema import (
    BenchCell,
    BenchReport,
    CellMetrics,
    health_of_client,
)
from forge.parts.toolsets.benchmark_job import planned_load
from forge.parts.toolsets.benchmark_report import LoadProgress, merged_cells
from forge.report_faults import report_faults
from tests.rig_programs import write_broken_gate, write_programs
from tests.scripted_rig import SERVER, scripted_rig
from tests.scripted_sse import ROOT, ScriptedProcess

QUICK = {"ttft_ms": 10, "tpot_ms": 1}
SMALL = {"concurrency": [1, 2], "context_tokens": [64], "output_tokens": 8, "requests_per_cell": 6}
PATIENCE_S = 90.0


class BenchmarkCase(unittest.IsolatedAsyncioTestCase):
    server: ScriptedProcess

    @classmethod
    def setUpClass(cls) -> None:
        cls.server = cls.enterClassContext(ScriptedProcess())

    def setUp(self) -> None:
        place = Path(self.enterContext(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        self.folder = place / "rig"
        self.folder.mkdir()
        (self.folder / "server.py").write_text(SERVER)
        write_programs(self.folder)
        self.serve_on(self.server.port)
        environment = {
            **os.environ,
            "XDG_STATE_HOME": str(place / "state"),
            "XDG_CACHE_HOME": str(place / "cache"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        for name in ("ENGINE_PORT", "DTYPE", "MAX_MODEL_LEN"):
            environment.pop(name, None)
        self.enterContext(mock.patch.dict(os.environ, environment, clear=True))
        self.rig = AssembledRig(scripted_rig(), self.folder / "server.py")
        self.state = self.rig.context.paths.state
        self.addCleanup(self.end_workers)
        self.server.obey(**QUICK)

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().slow_callback_duration = PATIENCE_S  # a busy machine is no news

    def serve_on(self, port: int) -> None:
        (self.folder / "tpu.env").write_text(f"ENGINE_PORT={port}\n")

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

    async def until(self, condition: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.assertLess(time.monotonic(), deadline)
            await asyncio.sleep(0.05)

    def results(self, job_id: str) -> str:
        path = self.state / "loads" / job_id / "results.jsonl"
        return path.read_text() if path.exists() else ""

    def report(self, name: str) -> BenchReport:
        path = self.state / "benchmarks" / "reports" / f"{name}.json"
        self.assertEqual(report_faults(path), [])
        return BenchReport.model_validate_json(path.read_bytes())

    def loader_of(self, job_id: str) -> psutil.Process:
        worker = self.rig.context.jobs.read(job_id).worker_pid
        children = psutil.Process(worker).children(recursive=True)
        return next(c for c in children if any(w.endswith("loadgen.py") for w in c.cmdline()))

    async def begun(self, client: Client, **more: Any) -> str:
        """A benchmark whose second cell lasts until it is ended; its id, once that cell runs."""
        arguments = {**SMALL, "context_tokens": [64], "requests_per_cell": 5000, **more}
        arguments |= {"concurrency": [1, 2], "seconds_per_cell": 1.5}
        begun = await self.called(client, "run_benchmark", **arguments)
        job_id = str(begun["job_id"])
        await self.until(lambda: '"event":"cell begins","cell":1' in self.results(job_id))
        await self.until(lambda: self.results(job_id).count('"phase":"warm-up"') > 3)
        return job_id


class WholeRunTest(BenchmarkCase):
    async def test_from_the_call_to_the_report_in_both_protocol_modes(self) -> None:
        names = []
        for options in ({}, {"mode": "legacy"}):
            heard: list[tuple[float, str | None]] = []

            async def hear(progress: float, _total: float | None, message: str | None) -> None:
                heard.append((progress, message))  # noqa: B023

            async with self.client(**options) as client:
                # Long enough to be followed, too few for the rule.
                arguments = {**SMALL, "requests_per_cell": 40, "wait_s": 50}
                result = await client.call_tool("run_benchmark", arguments, progress_callback=hear)
                begun = result.structured_content or {}
                self.assertFalse(result.is_error, begun)
                job = await self.finished(client, begun["job_id"])
                self.assertEqual(job["state"], "done", job)
                listed = await self.called(client, "list_reports")
            shares = [share for share, _ in heard]
            self.assertEqual((shares, shares[-1]), (sorted(set(shares)), 100))
            self.assertTrue(any("of 2" in (text or "") for _, text in heard), heard)
            self.assertEqual(listed["reports"][0]["name"], job["result"]["report"])
            names.append(job["result"]["report"])
        self.assertEqual(len(set(names)), 2)
        report = self.report(names[0])
        self.assertEqual([c.id for c in report.cells], ["c1-i64-o8", "c2-i64-o8"])
        for cell in report.cells:
            assert cell.metrics and cell.client, cell.reason
            self.assertEqual(cell.metrics.requests_completed, 40)
            self.assertTrue(cell.short_sample)
        self.assertEqual((report.token_source, report.run.kind), ("usage", "measured"))
        self.assertEqual((report.workload.prompts, report.workload.ignore_eos), ("distinct", True))
        self.assertEqual((report.engine.name, report.hardware.slot), ("pytorch", "cpu"))
        self.assertEqual(report.engine.server, self.rig.context.version)
        self.assertEqual(len(report.raw), 1)

    async def test_the_same_without_a_report(self) -> None:
        async with self.client() as client:
            begun = await self.called(client, "run_benchmark", **SMALL, save_result=False)
            job = await self.finished(client, begun["job_id"])
            listed = await self.called(client, "list_reports")
        self.assertEqual((job["state"], job["result"]["saved"]), ("done", False))
        self.assertEqual(
            [line.split(":")[0] for line in job["result"]["cells"]], ["c1-i64-o8", "c2-i64-o8"]
        )
        self.assertEqual(listed["total"], 0)

    async def test_repeats_and_open_loop_and_a_fresh_seed(self) -> None:
        arguments = {**SMALL, "concurrency": [2], "request_rates": [50], "repeats": 3}
        async with self.client() as client:
            begun = await self.called(client, "run_benchmark", **arguments)
            self.assertEqual(begun["planned_cells"], 6)
            job = await self.finished(client, begun["job_id"])
        report = self.report(job["result"]["report"])
        self.assertEqual([c.id for c in report.cells], ["c2-i64-o8", "r50-i64-o8"])
        assert report.cells[1].metrics
        self.assertIsNotNone(report.cells[1].metrics.ttft_from_schedule_ms)
        self.assertGreater(report.workload.seed or 0, 0)

    async def test_a_stalled_server_and_a_dead_one_are_failed_cells(self) -> None:
        self.server.obey(**QUICK, fault="stalls")
        async with self.client() as client:
            begun = await self.called(client, "run_benchmark", **SMALL, stall_s=1)
            stalled = await self.finished(client, begun["job_id"])
            self.serve_on(1)  # nobody listens there
            begun = await self.called(client, "run_benchmark", **SMALL)
            dead = await self.finished(client, begun["job_id"])
        for job, words in ((stalled, "no byte for 1 s"), (dead, "cannot connect")):
            self.assertEqual(job["state"], "done")
            report = self.report(job["result"]["report"])
            self.assertEqual([cell.status for cell in report.cells], ["failed"] * 2)
            self.assertTrue(all(words in cell.reason for cell in report.cells), report.cells)

    def test_the_name_follows_the_runtimes_vocabulary(self) -> None:
        names = {
            tool.name
            for tool in AssembledRig(scripted_rig("vllm_"), self.folder / "server.py").tools()
        }
        self.assertIn("run_vllm_benchmark", names)
        self.assertNotIn("run_benchmark", names)


class MergedCellsTest(unittest.TestCase):
    """Repeats become one cell; what a busy client measured stands back."""

    PLAN = LoadPlan(
        base_url="http://127.0.0.1:1",
        model="m",
        cells=[
            LoadCellPlan(concurrency=c, input_tokens=64, output_tokens=8, requests=5, seconds=9)
            for c in (1, 2, 3)
        ]
        * 3,
    )

    def ok(self, number: int, rate: float, lag_ms: float = 1.0) -> BenchCell:
        metrics = CellMetrics(output_tps=rate, requests_sent=5, requests_completed=5)
        client = health_of_client(0.1, lag_ms, 0.0)
        return self.PLAN.cells[number].cell(status="ok", metrics=metrics, client=client)

    def test_the_middle_one_with_its_variation(self) -> None:
        found = LoadProgress(Path("nowhere"))
        found.cells = {0: self.ok(0, 90), 3: self.ok(0, 110), 6: self.ok(0, 100)}
        found.cells |= {1: self.ok(1, 50, lag_ms=99), 4: self.ok(1, 70)}
        found.current = 7
        one, two, three = merged_cells(self.PLAN, found, "it was ended")
        assert one.metrics and two.metrics
        self.assertEqual((one.metrics.output_tps, one.repeats), (100, 3))
        self.assertAlmostEqual(one.cv or 0, 0.1)
        self.assertEqual((two.metrics.output_tps, two.repeats, two.cv), (70, 1, None))
        self.assertEqual((three.status, three.reason), ("not_run", "it was ended"))

    def test_a_failure_counts_only_where_nothing_succeeded(self) -> None:
        found = LoadProgress(Path("nowhere"))
        broken = self.PLAN.cells[1].cell(status="failed", reason="broken")
        found.cells = {0: self.PLAN.cells[0].cell(status="failed", reason="x"), 3: self.ok(0, 9)}
        found.cells |= {1: broken, 4: broken}
        one, two, _ = merged_cells(self.PLAN, found, "it was ended")
        self.assertEqual((one.status, two.status, two.reason), ("ok", "failed", "broken"))
        self.assertEqual((one.repeats, len(one.marks)), (1, 1))
        self.assertIn("1 of 2 repeats", one.marks[0])


class RefusalTest(BenchmarkCase):
    BAD: tuple[tuple[str, dict[str, Any]], ...] = (
        ("concurrency", {"concurrency": [0]}),
        ("concurrency", {"concurrency": [1, 10_000]}),
        ("concurrency", {"concurrency": []}),
        ("concurrency", {"concurrency": ["many"]}),
        ("concurrency", {"concurrency": list(range(1, 14))}),
        ("context_tokens", {"context_tokens": []}),
        ("context_tokens", {"context_tokens": [300_000]}),
        ("context_tokens", {"context_tokens": [64, 4090], "output_tokens": 8}),
        ("output_tokens", {"output_tokens": 0}),
        ("request_rates", {"request_rates": [0]}),
        ("request_rates", {"request_rates": ["nan"]}),
        ("repeats", {"repeats": 10}),
        ("seconds_per_cell", {"seconds_per_cell": 0}),
        ("stall_s", {"stall_s": "inf"}),
        ("endpoint", {"endpoint": "http://example.com"}),
        ("speculative", {"speculative": True}),
        ("cells", {"concurrency": list(range(1, 13)), "context_tokens": [64, 65], "repeats": 9}),
    )

    async def test_bad_input_is_refused_by_name_and_nothing_starts(self) -> None:
        async with self.client() as client:
            for name, arguments in self.BAD:
                with self.subTest(arguments=arguments):
                    text = await self.refused(client, "run_benchmark", **arguments)
                    self.assertTrue(text.startswith("INVALID "), text)
                    self.assertIn(name, text)
        self.assertEqual(self.rig.context.jobs.all(), [])
        self.assertEqual(self.server.requests(), [])

    async def test_nothing_is_served(self) -> None:
        self.serve_on(0)
        self.rig = AssembledRig(scripted_rig(), self.folder / "server.py")
        async with self.client() as client:
            text = await self.refused(client, "run_benchmark", **SMALL)
        self.assertTrue(text.startswith("NOT_FOUND "), text)

    async def test_two_at_once_would_measure_each_other(self) -> None:
        async with self.client() as client:
            begun = await self.called(client, "run_benchmark", **SMALL)
            text = await self.refused(client, "run_benchmark", **SMALL)
            self.assertTrue(text.startswith("BUSY "), text)
            self.assertIn(begun["job_id"], text)
            await self.finished(client, begun["job_id"])

    def test_doubles_are_measured_once(self) -> None:
        cells = planned_load(
            {
                **SMALL,
                "concurrency": [1],
                "request_rates": [0.5],
                "requests_per_cell": 0,
                "seconds_per_cell": 60,
                "repeats": 1,
            }
        )
        self.assertEqual(
            [(c.cell_id, c.requests) for c in cells], [("c1-i64-o8", 50), ("r0.5-i64-o8", 100)]
        )


class BrokenRunTest(BenchmarkCase):
    """Whoever is killed, what was finished is kept, and no load goes on."""

    async def test_cancel(self) -> None:
        async with self.client() as client:
            job_id = await self.begun(client)
            loader = self.loader_of(job_id)
            done = await self.called(client, "cancel_job", job_id=job_id)
        self.assertEqual(done["state"], "cancelled")
        self.assertFalse(loader.is_running() and loader.status() != psutil.STATUS_ZOMBIE)
        report = self.report(done["result"]["report"])
        self.assertEqual([cell.status for cell in report.cells], ["ok", "interrupted"])
        self.assertIn("cancelled", report.cells[1].reason)

    async def test_the_generator_is_killed(self) -> None:
        async with self.client() as client:
            job_id = await self.begun(client)
            self.loader_of(job_id).kill()
            done = await self.finished(client, job_id)
        self.assertEqual(done["state"], "failed")
        self.assertTrue(done["error"].startswith("PARTIAL "), done["error"])
        report = self.report(done["result"]["report"])
        self.assertEqual([cell.status for cell in report.cells], ["ok", "interrupted"])

    async def test_the_worker_is_killed(self) -> None:
        async with self.client() as client:
            job_id = await self.begun(client)
            loader = self.loader_of(job_id)
            worker = psutil.Process(self.rig.context.jobs.read(job_id).worker_pid)
            worker.kill()
            await self.until(
                lambda: not loader.is_running() or loader.status() == psutil.STATUS_ZOMBIE
            )
            lost = await self.called(client, "get_job", job_id=job_id)
            self.assertEqual(lost["state"], "lost")
            again = await self.called(client, "run_benchmark", **SMALL)
            self.assertEqual(len(again["notes"]), 1, again)
            self.assertIn(job_id, again["notes"][0])
            await self.finished(client, again["job_id"])
            listed = await self.called(client, "list_reports")
            third = await self.called(client, "run_benchmark", **SMALL)
            self.assertEqual(third["notes"], [])
            await self.finished(client, third["job_id"])
        self.assertEqual(listed["total"], 2)
        salvaged = self.report(sorted(item["name"] for item in listed["reports"])[0])
        self.assertEqual([cell.status for cell in salvaged.cells], ["ok", "interrupted"])
        self.assertIn("killed", salvaged.cells[1].reason)

    async def test_without_the_gate_no_load_begins(self) -> None:
        (self.folder / "judge.py").unlink()
        asked = len(self.server.requests())
        async with self.client() as client:
            begun = await self.called(client, "run_benchmark", **SMALL)
            done = await self.finished(client, begun["job_id"])
        self.assertEqual(done["state"], "failed")
        self.assertTrue(done["error"].startswith("NOT_FOUND judge.py is not beside"), done)
        self.assertEqual(len(self.server.requests()), asked)

    async def test_the_gate_fails_after_the_load(self) -> None:
        write_broken_gate(self.folder)
        async with self.client() as client:
            begun = await self.called(client, "run_benchmark", **SMALL)
            done = await self.finished(client, begun["job_id"])
            raw = self.state / "loads" / begun["job_id"] / "results.jsonl"
            self.assertEqual(done["state"], "failed")
            for words in ("PARTIAL no report was written", "out of order", str(raw)):
                self.assertIn(words, done["error"])
            self.assertTrue(done["error"].endswith("Next: run_benchmark(), which saves it first"))
            self.assertIn('"event":"end"', raw.read_text())
            # The figures are told, as those of a run that nobody wanted saved.
            result = done["result"]
            self.assertEqual(
                (result["report"], result["saved"], len(result["cells"])), ("", False, 2)
            )
            self.assertTrue(all("output tokens/s" in line for line in result["cells"]), result)

            again = await self.called(client, "run_benchmark", **SMALL)
            self.assertEqual(len(again["notes"]), 1, again)
            self.assertIn("could not be saved: PARTIAL", again["notes"][0])
            await self.finished(client, again["job_id"])
            self.assertEqual((await self.called(client, "list_reports"))["total"], 0)

            write_programs(self.folder)
            third = await self.called(client, "run_benchmark", **SMALL)
            self.assertEqual(len(third["notes"]), 2, third)
            self.assertTrue(all("the unsaved run" in note for note in third["notes"]), third)
            await self.finished(client, third["job_id"])
            names = [r["name"] for r in (await self.called(client, "list_reports"))["reports"]]
        self.assertEqual(len(names), 3)
        for name in names:
            report = self.report(name)
            self.assertEqual([cell.status for cell in report.cells], ["ok", "ok"])
            self.assertGreater(report.run.duration_s or 0, 0)

    async def test_the_gate_fails_after_a_cancel(self) -> None:
        write_broken_gate(self.folder)
        async with self.client() as client:
            job_id = await self.begun(client)
            done = await self.called(client, "cancel_job", job_id=job_id)
            self.assertEqual(done["state"], "cancelled")
            self.assertEqual((done["result"]["report"], done["result"]["saved"]), ("", False))
            self.assertTrue(done["result"]["unsaved"].startswith("PARTIAL no report was"), done)
            self.assertEqual(len(done["result"]["cells"]), 2)
            write_programs(self.folder)
            again = await self.called(client, "run_benchmark", **SMALL)
            await self.finished(client, again["job_id"])
            listed = await self.called(client, "list_reports")
        self.assertIn(f"the unsaved run {job_id} was saved as", again["notes"][0])
        report = self.report(sorted(item["name"] for item in listed["reports"])[0])
        self.assertEqual([cell.status for cell in report.cells], ["ok", "interrupted"])
        self.assertIn("cancelled", report.cells[1].reason)

    async def test_raw_data_names_no_path_and_no_key(self) -> None:
        secret = "sk-" + "a1" * 20
        self.enterContext(mock.patch.dict(os.environ, {"SCRIPTED_API_KEY": secret}))
        async with self.client() as client:
            begun = await self.called(client, "run_benchmark", **SMALL)
            job = await self.finished(client, begun["job_id"])
        report = self.report(job["result"]["report"])
        raw = (self.state / "benchmarks" / report.raw[0].path).read_text()
        everything = raw + report.model_dump_json() + json.dumps(job)
        self.assertNotIn(secret, everything)
        self.assertNotIn(str(self.folder), everything)


if __name__ == "__main__":
    unittest.main()
