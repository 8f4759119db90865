"""The load generator against a scripted server: what it sends, what it counts, what it refuses.

Logic only: the proof that its times are right within 3 % is `make bench-client`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

from forge.parts.boundaries.load_cell import ClientGauge
from forge.parts.boundaries.load_client import LoadClient, LoadTarget
from forge.parts.boundaries.load_events import StreamRecord
from forge.parts.boundaries.load_figures import MeasuredLoad, cell_of_load
from forge.parts.boundaries.load_generator import fast_loop_factory, run_load
from forge.parts.boundaries.load_plan import (
    LOAD_PLAN_FILE,
    LOAD_RESULTS_FILE,
    LoadCellPlan,
    LoadPlan,
    least_requests,
)
from forge.parts.boundaries.load_prompts import PromptMaker
from forge.parts.knowledge.report_schema import (
    BenchCell,
    CellMetrics,
    GoodputLimits,
    health_of_client,
)
from forge.parts.knowledge.token_fit import TokenFit
from forge.parts.toolsets.benchmark_report import LoadProgress
from tests.scripted_sse import ROOT, ScriptedProcess

QUICK = {"ttft_ms": 10, "tpot_ms": 1}


def cell_plan(**more: Any) -> LoadCellPlan:
    fields = {"concurrency": 2, "input_tokens": 100, "output_tokens": 8, "requests": 8}
    return LoadCellPlan.model_validate({**fields, "seconds": 20, **more})


class Loaded:
    """One run: its events, its cells, and the server's view of it."""

    def __init__(self, server: ScriptedProcess, cells: list[LoadCellPlan], **plan: Any) -> None:
        self.events: list[dict[str, Any]] = []
        whole = LoadPlan(base_url=server.url, model="m", cells=cells, **plan)
        with asyncio.Runner(loop_factory=fast_loop_factory()) as runner:
            runner.run(run_load(whole, self.events.append))
        ended = [event for event in self.events if event["event"] == "cell"]
        self.cells = [BenchCell.model_validate(event["result"]) for event in ended]
        self.requests = [event for event in self.events if event["event"] == "request"]

    @property
    def cell(self) -> BenchCell:
        return self.cells[0]

    @property
    def metrics(self) -> CellMetrics:
        assert self.cell.metrics is not None, self.cell.reason
        return self.cell.metrics

    def phase(self, name: str) -> list[dict[str, Any]]:
        return [request for request in self.requests if request["phase"] == name]


class ServerCase(unittest.TestCase):
    server: ScriptedProcess

    @classmethod
    def setUpClass(cls) -> None:
        cls.server = cls.enterClassContext(ScriptedProcess())

    def load(
        self, *cells: LoadCellPlan, script: dict[str, Any] | None = None, **plan: Any
    ) -> Loaded:
        self.server.obey(**{**QUICK, **(script or {})})
        return Loaded(self.server, list(cells) or [cell_plan()], **plan)


class ClosedLoopTest(ServerCase):
    def test_counts_and_tokens_are_the_servers(self) -> None:
        done = self.load(cell_plan(concurrency=4, requests=20))
        m = done.metrics
        self.assertEqual((m.requests_sent, m.requests_completed, m.errors), (20, 20, {}))
        assert m.completion_tokens and m.prompt_tokens and m.ttft_ms and m.tpot_ms and m.icl_ms
        self.assertEqual((m.completion_tokens.mean, m.short_outputs), (8, 0))
        self.assertAlmostEqual(m.prompt_tokens.mean or 0, 100, delta=5)
        self.assertEqual((m.ttft_ms.n, m.tpot_ms.n, m.icl_ms.n), (20, 20, 20 * 7))
        # No chunk can come before its schedule; late ones are a matter of the machine.
        self.assertGreater(m.ttft_ms.median or 0, 10)
        self.assertGreater(m.tpot_ms.mean or 0, 0.5)
        assert m.request_rps and m.output_tps and m.total_tps
        self.assertAlmostEqual(m.output_tps / m.request_rps, 8, delta=0.5)
        self.assertAlmostEqual(m.total_tps / m.output_tps, 108 / 8, delta=1)
        self.assertTrue(0 < (m.achieved_concurrency or 0) <= 4.01)
        self.assertIsNone(m.ttft_from_schedule_ms)

    def test_no_more_streams_than_asked_and_all_of_them(self) -> None:
        done = self.load(cell_plan(concurrency=3, requests=12))
        marks = [(r["sent"], 1) for r in done.requests if r["phase"] != "warm-up"]
        marks += [(r["ended"], -1) for r in done.requests if r["phase"] != "warm-up"]
        level = most = 0
        for _, step in sorted(marks):
            level += step
            most = max(most, level)
        self.assertEqual(most, 3)

    def test_warm_ups_and_ramp_are_not_counted(self) -> None:
        done = self.load(cell_plan(concurrency=4, requests=16), warmups=3)
        self.assertEqual(len(done.phase("warm-up")), 4)  # as many as streams, at least three
        self.assertEqual(len(done.phase("measured")), 16)
        self.assertGreaterEqual(len(done.phase("ramp")), 3)
        single = self.load(cell_plan(concurrency=1, requests=4))
        self.assertEqual((len(single.phase("warm-up")), len(single.phase("ramp"))), (3, 0))

    def test_a_cell_ends_when_its_time_is_over(self) -> None:
        done = self.load(cell_plan(requests=10_000, seconds=1, output_tokens=20))
        self.assertTrue(0.9 < (done.metrics.duration_s or 0) < 10)
        self.assertLess(done.metrics.requests_sent or 0, 10_000)

    def test_p99_only_from_a_hundred_requests_on(self) -> None:
        few = self.load(cell_plan(requests=99, concurrency=8)).metrics
        many = self.load(cell_plan(requests=100, concurrency=8)).metrics
        assert few.ttft_ms and many.ttft_ms
        self.assertIsNone(few.ttft_ms.p99)
        self.assertIsNotNone(many.ttft_ms.p99)

    def test_the_rule_for_samples(self) -> None:
        self.assertEqual([least_requests(c) for c in (1, 6, 7, 64)], [50, 50, 56, 512])
        self.assertTrue(self.load(cell_plan(requests=49, concurrency=6)).cell.short_sample)
        self.assertFalse(self.load(cell_plan(requests=50, concurrency=6)).cell.short_sample)

    def test_goodput_counts_what_keeps_every_limit(self) -> None:
        cell = cell_plan(requests=10)
        kept = self.load(cell, limits=GoodputLimits(ttft_ms=60_000, tpot_ms=60_000)).metrics
        self.assertEqual(kept.goodput_rps, kept.request_rps)
        for limits in (GoodputLimits(ttft_ms=9), GoodputLimits(tpot_ms=0.01)):
            with self.subTest(limits=limits):
                self.assertEqual(self.load(cell, limits=limits).metrics.goodput_rps, 0)


class OpenLoopTest(ServerCase):
    def test_arrivals_are_seeded_and_do_not_wait_for_answers(self) -> None:
        plan = cell_plan(concurrency=None, rate_rps=40, requests=20)
        slow = {"ttft_ms": 400}
        runs = [self.load(plan, script=slow, seed=seed) for seed in (1, 1, 2)]
        gaps = []
        for run in runs:
            dues = sorted(request["due"] for request in run.phase("measured"))
            gaps.append([round(b - a, 4) for a, b in zip(dues, dues[1:], strict=False)])
        self.assertEqual(gaps[0], gaps[1])
        self.assertNotEqual(gaps[0], gaps[2])
        m = runs[0].metrics
        self.assertEqual((m.requests_sent, m.requests_completed), (20, 20))
        # At 40 a second and 0.4 s each, waiting for answers would keep it at 1.
        self.assertGreater(m.achieved_concurrency or 0, 3)

    def test_latency_from_the_schedule_contains_the_wait(self) -> None:
        done = self.load(cell_plan(concurrency=None, rate_rps=50, requests=10))
        m = done.metrics
        assert m.ttft_ms and m.ttft_from_schedule_ms and m.e2e_ms and m.e2e_from_schedule_ms
        self.assertGreaterEqual(m.ttft_from_schedule_ms.mean or 0, m.ttft_ms.mean or 0)
        self.assertGreaterEqual(m.e2e_from_schedule_ms.mean or 0, m.e2e_ms.mean or 0)
        for request in done.phase("measured"):
            self.assertGreaterEqual(request["sent"], request["due"])

    def test_a_queue_that_only_grows_is_said_to_be_one(self) -> None:
        plan = cell_plan(concurrency=None, rate_rps=200, requests=20)
        done = self.load(plan, script={"ttft_ms": 1500})
        self.assertTrue(any("no steady state" in mark for mark in done.cell.marks), done.cell.marks)
        calm = self.load(cell_plan(concurrency=None, rate_rps=10, requests=10))
        self.assertFalse(any("no steady state" in mark for mark in calm.cell.marks))


class PromptTest(ServerCase):
    def test_no_two_prompts_begin_alike(self) -> None:
        cells = [cell_plan(input_tokens=n, concurrency=c) for n in (64, 512) for c in (1, 2)]
        self.load(*cells, *cells)  # also where a grid is repeated
        asks = [ask["body"] for ask in self.server.requests()]
        heads = [" ".join(ask["messages"][0]["content"].split()[:12]) for ask in asks]
        measured = heads[2:]  # the two that calibrate share theirs on purpose
        self.assertEqual(len(set(measured)), len(measured))

    def test_the_same_seed_gives_the_same_prompts(self) -> None:
        one, same, other = (PromptMaker(seed, 300) for seed in ("1/a", "1/a", "2/a"))
        self.assertEqual(one.text(5), same.text(5))
        self.assertNotEqual(one.text(5), one.text(6))
        self.assertNotEqual(one.text(5), other.text(5))
        self.assertEqual(json.loads(b'"%b"' % one.text(5)), one.text(5).decode())
        sizes = {len(PromptMaker("1/a", n).text(1).split()) - n for n in (1, 5, 12, 13, 300, 4000)}
        self.assertEqual(len(sizes), 1)  # the ending's words

    def test_lengths_are_met_whatever_a_word_costs(self) -> None:
        for template, each in ((0, 1.0), (37, 1.0), (12, 2.4)):
            script = {"template_tokens": template, "tokens_per_word": each}
            cells = [cell_plan(input_tokens=n) for n in (96, 3000)]
            done = self.load(*cells, script=script)
            for cell in done.cells:
                with self.subTest(script=script, cell=cell.id):
                    assert cell.metrics and cell.metrics.prompt_tokens, cell.reason
                    mean = cell.metrics.prompt_tokens.mean or 0
                    self.assertAlmostEqual(mean / cell.input_tokens, 1, delta=0.03)

    def test_a_server_that_cuts_prompts_fails_the_cell(self) -> None:
        short, long = cell_plan(input_tokens=100), cell_plan(input_tokens=1000)
        done = self.load(short, long, script={"most_prompt_tokens": 300})
        self.assertEqual([cell.status for cell in done.cells], ["ok", "failed"])
        self.assertIn("300 tokens by the server's count", done.cells[1].reason)
        self.assertIn("-70%", done.cells[1].reason)

    def test_a_count_that_does_not_grow_is_no_count(self) -> None:
        done = self.load(script={"most_prompt_tokens": 5})
        self.assertEqual(done.cell.status, "failed")
        self.assertIn("does not grow", done.cell.reason)

    def test_a_template_that_is_longer_than_the_prompt(self) -> None:
        done = self.load(cell_plan(input_tokens=32), script={"template_tokens": 40})
        self.assertEqual(done.cell.status, "infeasible")
        with self.assertRaises(ValueError):
            TokenFit.through((10, 20.0), (100, 20.0))


class HonestyTest(ServerCase):
    def test_chunks_are_not_tokens(self) -> None:
        plan = cell_plan(output_tokens=32, concurrency=1)
        m = self.load(plan, script={"tokens_per_chunk": 8, "tpot_ms": 10}).metrics
        assert m.tpot_ms and m.icl_ms and m.completion_tokens and m.e2e_ms and m.ttft_ms
        self.assertEqual((m.icl_ms.n, m.completion_tokens.mean), (8 * 3, 32))
        whole = (m.e2e_ms.mean or 0) - (m.ttft_ms.mean or 0)
        self.assertAlmostEqual(m.tpot_ms.mean or 0, whole / 31, delta=0.01)
        self.assertGreater(m.icl_ms.median or 0, 3 * (m.tpot_ms.median or 0))

    def test_short_outputs_are_counted_and_not_assumed(self) -> None:
        done = self.load(cell_plan(output_tokens=20), script={"most_tokens": 5})
        m = done.metrics
        assert m.completion_tokens is not None
        self.assertEqual((m.short_outputs, m.completion_tokens.mean), (8, 5))
        self.assertTrue(any("ended before" in mark for mark in done.cell.marks))

    def test_ignore_eos_is_asked_for_and_given_up_where_it_is_refused(self) -> None:
        self.load()
        self.assertTrue(all(ask["body"]["ignore_eos"] for ask in self.server.requests()))
        done = self.load(script={"refused_fields": ["ignore_eos"]})
        self.assertEqual(done.cell.status, "ok")
        self.assertFalse(done.events[-1]["ignore_eos"])
        self.assertTrue(any("ignore_eos" in mark for mark in done.cell.marks))
        strict = self.load(script={"refused_fields": ["ignore_eos", "stream_options"]})
        self.assertEqual(strict.cell.status, "ok")
        picky = self.load(script={"refused_fields": ["model"]})
        self.assertEqual(picky.cell.status, "failed")
        self.assertIn("extra fields not permitted: model", picky.cell.reason)

    def test_cached_tokens_are_told(self) -> None:
        done = self.load(script={"cached_tokens": 64})
        self.assertEqual(done.metrics.cached_tokens, 8 * 64)
        self.assertTrue(any("from its cache" in mark for mark in done.cell.marks))

    def test_a_client_that_cannot_keep_up_says_so(self) -> None:
        async def blocked() -> BenchCell:
            client = LoadClient(LoadTarget.from_url(self.server.url))
            body = json.dumps({"messages": [{"content": "a"}], "max_tokens": 200}).encode()

            def block() -> None:
                time.sleep(0.05)
                asyncio.get_running_loop().call_later(0.03, block)

            gauge = ClientGauge()
            block()
            load = MeasuredLoad([await client.ask(body)], [None])
            client.close()
            load.window = (load.records[0].sent, load.records[0].ended)
            load.records[0].prompt_tokens = 100
            health = gauge.stop(load.records)
            return cell_of_load(cell_plan(concurrency=1), load, health, GoodputLimits())

        self.server.obey(**QUICK)
        cell = asyncio.run(blocked())
        assert cell.client is not None
        self.assertFalse(cell.trusted)
        self.assertGreater(cell.client.loop_lag_p99_ms, 20)
        self.assertGreater(cell.client.coalesced_share, 0.05)
        self.assertEqual(len([m for m in cell.marks if "client" in m or "together" in m]), 2)


class FiguresTest(unittest.TestCase):
    """The arithmetic on records with round times."""

    PLAN = LoadCellPlan(concurrency=2, input_tokens=10, output_tokens=5, requests=2, seconds=60)

    def record(self, sent: float, *arrivals: float, **more: Any) -> StreamRecord:
        fields = {"prompt_tokens": 10, "completion_tokens": 5, **more}
        return StreamRecord(
            sent=sent, arrivals=list(arrivals), ended=(arrivals or (sent,))[-1], **fields
        )

    def cell(self, *records: StreamRecord, window: tuple[float, float]) -> BenchCell:
        load = MeasuredLoad(list(records), [None] * len(records), window)
        return cell_of_load(self.PLAN, load, health_of_client(0.1, 1.0, 0.0), GoodputLimits())

    def test_definitions(self) -> None:
        m = self.cell(self.record(1.0, 1.5, 1.7, 2.1), window=(1.0, 2.1)).metrics
        assert m and m.ttft_ms and m.tpot_ms and m.icl_ms and m.e2e_ms
        self.assertAlmostEqual(m.ttft_ms.mean or 0, 500)
        self.assertAlmostEqual(m.tpot_ms.mean or 0, 1000 * 0.6 / 4)
        self.assertAlmostEqual(m.e2e_ms.mean or 0, 1100)
        self.assertAlmostEqual(m.icl_ms.mean or 0, 300)
        self.assertAlmostEqual(m.output_tps or 0, 5 / 1.1)
        self.assertAlmostEqual(m.total_tps or 0, 15 / 1.1)

    def test_a_single_token_has_no_time_per_token(self) -> None:
        m = self.cell(self.record(0.0, 0.5, completion_tokens=1), window=(0.0, 1.0)).metrics
        assert m is not None
        self.assertIsNone(m.tpot_ms)
        self.assertIsNone(m.icl_ms)

    def test_rates_are_of_the_window_and_latencies_of_what_began_in_it(self) -> None:
        ramp = self.record(0.0, 0.6, 0.8, 1.2, 1.4)  # half of it within the window
        inside = self.record(1.0, 1.2, 1.9)
        drain = self.record(1.5, 1.8, 2.5)  # half of it within the window
        m = self.cell(ramp, inside, drain, window=(1.0, 2.0)).metrics
        assert m and m.ttft_ms
        self.assertEqual((m.requests_sent, m.ttft_ms.n), (2, 2))
        self.assertAlmostEqual(m.request_rps or 0, 0.5 + 1 + 0.5)
        self.assertAlmostEqual(m.output_tps or 0, 10)
        self.assertAlmostEqual(m.achieved_concurrency or 0, 0.4 + 0.9 + 0.5)

    def test_nothing_counts_that_did_not_complete(self) -> None:
        good = self.record(0.0, 0.5, 1.0)
        broken = self.record(0.0, 0.1, 0.2, 0.3, fault="the connection broke in mid-stream")
        cell = self.cell(good, broken, window=(0.0, 1.0))
        assert cell.metrics and cell.metrics.ttft_ms
        self.assertAlmostEqual(cell.metrics.output_tps or 0, 5)
        self.assertEqual(cell.metrics.ttft_ms.n, 1)
        self.assertEqual(cell.metrics.errors, {"the connection broke in mid-stream": 1})
        worse = self.cell(good, broken, broken, window=(0.0, 1.0))
        self.assertEqual((worse.status, worse.metrics), ("failed", None))
        self.assertIn("1 of 3", worse.reason)


class FaultyServerTest(ServerCase):
    """Each cell says what happened, the job goes on to the next, and it ends."""

    ALWAYS = {
        "stalls": "no byte for 1 s",
        "html": "text/html",
        "status 503": "status 503",
        "error event": "out of pages",
        "usage only": "no content",
        "no usage": "no usage",
        "no json": "no JSON",
        "huge line": "beyond all bounds",
        "drops": "broke in mid-stream",
    }

    def test_a_server_that_always_fails(self) -> None:
        for fault, words in self.ALWAYS.items():
            with self.subTest(fault=fault):
                two = [cell_plan(concurrency=1), cell_plan(concurrency=2)]
                done = self.load(*two, script={"fault": fault}, stall_s=1)
                self.assertEqual([cell.status for cell in done.cells], ["failed"] * 2)
                for cell in done.cells:
                    self.assertIn(words, cell.reason)
                    self.assertIsNone(cell.metrics)

    def test_every_fifth_connection_drops(self) -> None:
        done = self.load(cell_plan(requests=40), script={"fault": "drops", "every": 5})
        m = done.metrics
        self.assertEqual((m.requests_sent, sum(m.errors.values())), (40, 8))
        self.assertEqual(m.requests_completed, 32)
        self.assertIn("mid-stream", next(iter(m.errors)))
        self.assertTrue(any("8 of 40 requests failed" in mark for mark in done.cell.marks))

    def test_what_only_looks_odd(self) -> None:
        for script in ({"fault": "split utf8"}, {"fault": "one byte"}, {"framing": "close"}):
            with self.subTest(script=script):
                done = self.load(script=script)
                self.assertEqual((done.cell.status, done.metrics.errors), ("ok", {}))
                self.assertEqual(done.metrics.requests_completed, 8)

    def test_a_context_beyond_the_servers_limit(self) -> None:
        cells = [cell_plan(input_tokens=n) for n in (2000, 100)]
        done = self.load(*cells, script={"context_limit": 1000})
        self.assertEqual([cell.status for cell in done.cells], ["failed", "ok"])
        self.assertIn("maximum context length is 1000", done.cells[0].reason)

    def test_a_server_that_dies_in_mid_cell(self) -> None:
        with ScriptedProcess() as mortal:
            mortal.obey(ttft_ms=100, tpot_ms=100)
            killer = subprocess.Popen(["sh", "-c", f"sleep 4; kill -9 {mortal.pid}"])
            cells = [cell_plan(requests=100, seconds=60), cell_plan(concurrency=1)]
            done = Loaded(mortal, cells)
            killer.wait()
        self.assertEqual([cell.status for cell in done.cells], ["failed"] * 2)
        self.assertIn("cannot connect", done.cells[0].reason)
        self.assertIn("cannot connect", done.cells[1].reason)


class ProcessTest(ServerCase):
    """As `server.py loadgen` runs it: a folder, a file that outlives its writer, a parent."""

    CODE = (
        "import sys; from pathlib import Path;"
        "from forge.parts.boundaries.load_generator import run_load_folder;"
        "sys.exit(run_load_folder(Path(sys.argv[1])))"
    )

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.results = self.folder / LOAD_RESULTS_FILE
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}

    def write_plan(self, *cells: LoadCellPlan) -> None:
        plan = LoadPlan(base_url=self.server.url, model="m", cells=list(cells))
        (self.folder / LOAD_PLAN_FILE).write_text(plan.model_dump_json())

    def argv(self) -> list[str]:
        return [sys.executable, "-c", self.CODE, str(self.folder)]

    def until(self, what: str, count: int) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self.results.exists() and self.results.read_text().count(what) >= count:
                return
            time.sleep(0.05)
        self.fail(f"{what} did not come {count} times")

    def test_a_whole_run(self) -> None:
        self.server.obey(**QUICK)
        self.write_plan(cell_plan(), cell_plan(concurrency=1))
        done = subprocess.run(self.argv(), env=self.environment, timeout=60, capture_output=True)
        self.assertEqual((done.returncode, done.stderr), (0, b""))
        found = LoadProgress(self.folder).read()
        self.assertEqual([found.cells[n].status for n in (0, 1)], ["ok", "ok"])

    def test_what_was_measured_survives_a_kill(self) -> None:
        self.server.obey(ttft_ms=20, tpot_ms=5)
        self.write_plan(cell_plan(), cell_plan(concurrency=1, requests=10_000))
        process = subprocess.Popen(self.argv(), env=self.environment)
        self.until('"event":"cell begins"', 2)
        self.until('"phase":"measured"', 10)
        process.kill()
        process.wait()
        with self.results.open("a") as file:
            file.write('{"event":"cell","cell":1,"resu')
        found = LoadProgress(self.folder).read()
        self.assertEqual((list(found.cells), found.current), ([0], 1))
        self.assertEqual(found.cells[0].status, "ok")
        self.assertGreaterEqual(found.requests, 2)

    def test_it_ends_when_its_parent_is_gone(self) -> None:
        self.server.obey(ttft_ms=20, tpot_ms=5)
        self.write_plan(cell_plan(requests=10_000))
        code = (
            "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); input()"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", code, *self.argv()],
            env=self.environment,
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert parent.stdout is not None and parent.stdin is not None
        child = int(parent.stdout.readline())
        self.until('"phase":"measured"', 3)
        parent.kill()
        parent.communicate()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        gone = not Path(f"/proc/{child}").exists() or "Z" in _state_of(child)
        if not gone:
            os.kill(child, signal.SIGKILL)
        self.assertTrue(gone)


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


if __name__ == "__main__":
    unittest.main()
