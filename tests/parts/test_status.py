"""get_system_status through a real client: on a rig that rents and on one that does not.

Each half is seen there, seen missing with its reason, and seen failing without hiding the others;
every next step comes out of the closed set and names a tool that the rig has.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import unittest
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from mcp import Client

from forge.parts.assembly.rig import Rig
from forge.parts.ground.errors import RigError
from forge.parts.ground.state import private_folder
from forge.parts.planes.billing import cost_since
from forge.parts.planes.plane import Finding, Instance, Room
from forge.parts.planes.this_computer import ThisComputer
from forge.parts.toolsets import status as part
from forge.parts.toolsets.engine_load import EngineLoad
from forge.parts.toolsets.status_outcome import (
    STATUS_STEPS,
    CostHalf,
    MachineHalf,
    age_words,
    cost_words,
    status_lines,
    status_step,
)
from forge.rigs.local_pytorch_cpu_2b import RIG
from tests.diagnosed_rig import FakeModel
from tests.imaginary_case import UNPRICED_ZONE, ZONE, Caller, ImaginaryCase
from tests.parts.report_samples import report
from tests.rig_folder import RigFolderCase

FIGURES = set(EngineLoad.model_fields) - {"missing"}


def step_forms(words: Mapping[str, str]) -> set[str]:
    """Every next step that a rig of this vocabulary can name, with JOB for a job's id."""
    forms = set()
    for template in STATUS_STEPS.values():
        wanted = set(re.findall(r"\{(\w+)\}", template)) - {"job"}
        if wanted <= set(words):
            forms.add(template.format_map({**words, "job": "JOB"}))
    return forms


def check_step(
    test: unittest.TestCase, status: dict[str, Any], words: Mapping[str, str], tools: set[str]
) -> None:
    """The next step is one of the closed set, and what it names the rig has."""
    plain = re.sub(r"job_id='[^']+'", "job_id='JOB'", status["next_step"])
    test.assertIn(plain, step_forms(words))
    test.assertLessEqual(set(re.findall(r"(\w+)\(", status["next_step"])), tools)


class FaultyPlane(ThisComputer):
    """This computer, whose verbs fail as they are told: a refusal, a fault of ours, or a hang."""

    def __init__(self, *arguments: Any, faults: Mapping[str, str]) -> None:
        super().__init__(*arguments)
        self.faults = faults

    async def _fault(self, verb: str) -> None:
        fault = self.faults.get(verb, "")
        if fault == "hangs":
            await asyncio.sleep(60)
        if fault == "breaks":
            raise ZeroDivisionError("a fault of the plane, token hf_AAAAAAAAAA11")
        if fault == "refuses":
            raise RigError("UNREACHABLE", f"the place does not answer to {verb}")

    async def find(self) -> Finding:
        await self._fault("find")
        return await super().find()

    async def room(self, disk_folder: Path) -> Room:
        await self._fault("room")
        return await super().room(disk_folder)

    async def endpoint(self, instance: Instance) -> str:
        await self._fault("endpoint")
        return await super().endpoint(instance)

    async def cost_so_far(self) -> Any:
        await self._fault("cost_so_far")
        return None


class LocalCase(RigFolderCase):
    """The first rig, in this process."""

    async def status(self, rig: Rig = RIG, prepare: Callable[[Any], None] | None = None) -> Any:
        """The structured status, after the checks that hold for each."""
        assembled = self.assembled(rig)
        if prepare is not None:
            prepare(assembled.context)
        noise = StringIO()
        with redirect_stderr(noise):
            async with Client(assembled.server()) as client:
                tools = {tool.name for tool in (await client.list_tools()).tools}
                result = await client.call_tool("get_system_status", {})
        self.said = noise.getvalue()
        self.assertFalse(result.is_error, result.content)
        status = dict(result.structured_content or {})
        check_step(self, status, assembled.context.vocabulary, tools)
        for line in status["summary"].splitlines():
            self.assertLessEqual(len(line), 300)
        return status

    def faulty(self, **faults: str) -> Rig:
        return replace(
            RIG,
            make_plane=lambda paths, label, journal, _load: FaultyPlane(
                paths, label, journal, faults=faults
            ),
        )

    def model(self) -> FakeModel:
        """A ready model server under the rig's exact label, as a real start would leave it."""
        context = self.assembled(RIG).context
        model = FakeModel(self.folder / "model", RIG.name, context.owner)
        self.addCleanup(model.stop)
        return model

    def rewrite_record(self, **changes: Any) -> None:
        record = self.assembled(RIG).context.paths.state / "server.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))


class LocalStatusTest(LocalCase):
    async def test_nothing_runs(self) -> None:
        status = await self.status()
        self.assertEqual((status["state"], status["model"]), ("stopped", "embedded"))
        self.assertEqual((status["pid"], status["endpoint"], status["started_at"]), (None, "", ""))
        self.assertEqual(status["notes"], [])
        self.assertEqual(status["next_step"], "serve_model()")
        machine = status["machine"]
        self.assertEqual((machine["place"], machine["missing"]), ("this computer", ""))
        self.assertGreater(machine["memory_available_gb"], 0)
        self.assertLessEqual(
            machine["memory_available_gb"], psutil.virtual_memory().total / 1e9 + 0.01
        )
        self.assertGreater(machine["disk_free_gb"], 0)
        self.assertEqual(
            status["cost"],
            CostHalf(billed=False).model_dump(),
        )
        self.assertEqual((status["last_benchmark"], status["last_probe"]), (None, None))
        first, memory = status["summary"].splitlines()
        self.assertRegex(first, rf"^{RIG.name} \S+: embedded is stopped\.$")
        self.assertRegex(memory, r"^memory [█·]{20} [\d.]+ of [\d.]+ GB taken, [\d.]+ GB of disk")

    async def test_figures_that_the_engine_does_not_give_are_null(self) -> None:
        for ready in (False, True):
            if ready:
                self.model()
            load = (await self.status())["load"]
            self.assertEqual({load[name] for name in FIGURES}, {None})
            self.assertEqual(load["missing"], ["transformers serve (PyTorch) has no /metrics"])

    async def test_a_model_is_ready(self) -> None:
        model = self.model()
        self.rewrite_record(started_at="2020-01-01T00:00:00.000Z")
        status = await self.status()
        self.assertEqual((status["state"], status["pid"]), ("ready", model.pid))
        self.assertRegex(status["endpoint"], r"^http://127\.0\.0\.1:\d+/v1$")
        self.assertEqual(status["started_at"], "2020-01-01T00:00:00.000Z")
        self.assertRegex(
            status["summary"], r"embedded is ready at http\S+, started \d+ d \d+ h ago"
        )
        self.assertEqual(status["next_step"], "query_gemma4(prompt=…)")

    async def test_a_stamp_that_cannot_be_read_is_left_out(self) -> None:
        self.model()
        for stamp in ("", "yesterday", "2020-13-01"):
            self.rewrite_record(started_at=stamp)
            summary = (await self.status())["summary"]
            self.assertRegex(summary.splitlines()[0], r"/v1\.$")

    async def test_a_start_is_under_way(self) -> None:
        context = self.assembled(RIG).context
        job = self.job_under_way(context.jobs, "serve", {"model": "/models/other"}, ["load"])
        context.jobs.write(job.model_copy(update={"percent": 40.0}))
        status = await self.status()
        self.assertEqual((status["state"], status["model"]), ("starting", "/models/other"))
        self.assertIn("/models/other is starting (load, 40 %)", status["summary"])
        self.assertEqual(status["next_step"], "wait_for_model_ready(wait_s=50)")
        self.assertEqual(status["jobs"], [f"{job.id}: running, load"])

    async def test_other_work_is_under_way(self) -> None:
        self.model()
        context = self.assembled(RIG).context
        job = self.job_under_way(context.jobs, "benchmark", {}, ["run"])
        status = await self.status()
        self.assertEqual(status["state"], "ready")
        self.assertEqual(status["next_step"], f"get_job(job_id='{job.id}', wait_s=50)")

    async def test_a_start_was_left_half_done(self) -> None:
        self.model()
        self.rewrite_record(state="starting")
        status = await self.status()
        self.assertEqual(status["state"], "failed")
        self.assertIn("half-started", " ".join(status["notes"]))
        self.assertEqual(status["next_step"], "stop_model()")

    async def test_it_runs_but_listens_no_more(self) -> None:
        self.model()
        self.rewrite_record(port=9)
        status = await self.status()
        self.assertEqual((status["state"], status["endpoint"]), ("failed", ""))
        self.assertIn("it runs but does not answer", " ".join(status["notes"]))
        self.assertEqual(status["next_step"], "get_server_logs()")

    async def test_the_last_start_failed_or_was_lost(self) -> None:
        jobs = self.assembled(RIG).context.jobs
        for state, message, note in (
            ("failed", "the disk was full", "the last start failed: the disk was full"),
            ("lost", "its worker was killed", "is lost: its worker was killed"),
            ("cancelled", "cancelled", ""),
        ):
            with self.subTest(state):
                job = jobs.new("serve", {"model": "embedded"}, ["load"])
                jobs.write(job.model_copy(update={"state": state, "message": message}))
                status = await self.status()
                self.assertEqual(status["state"], "stopped")
                self.assertEqual(bool(status["notes"]), bool(note))
                self.assertIn(note, " ".join(status["notes"]))

    async def test_the_last_runs_are_named(self) -> None:
        benchmarks = self.assembled(RIG).context.paths.state / "benchmarks"
        fields = json.loads(report().model_dump_json())
        for kind, more in (
            ("reports", {}),
            ("probes", {"findings": [{"case": "x", "verdict": "silent"}]}),
        ):
            folder = private_folder(benchmarks / kind)
            (folder / "2026-03-04-a.json").write_text(json.dumps(fields | more))
        status = await self.status()
        bench, probe = status["last_benchmark"], status["last_probe"]
        self.assertEqual((bench["name"], bench["date"]), ("2026-03-04-a", "2026-03-04"))
        self.assertIn("at best 1200.0 output tokens/s", bench["line"])
        self.assertTrue(probe["line"].endswith(": 1 silent"), probe)
        (benchmarks / "reports" / "2026-03-05-b.json").write_text("{torn")
        bench = (await self.status())["last_benchmark"]
        self.assertIn("cannot be read", bench["line"])

    async def test_settings_at_fault_are_named_with_the_step(self) -> None:
        self.write_settings({"MODEL_NAME": "embedded", "PORT": "http"})
        status = await self.status()
        self.assertEqual((status["settings"], status["model"]), ({}, ""))
        self.assertIn("PORT (from tpu.env)", " ".join(status["notes"]))
        self.assertIn("no model is stopped", status["summary"])
        self.assertEqual(status["next_step"], STATUS_STEPS["settings"])

    async def test_it_changes_nothing(self) -> None:
        state = self.assembled(RIG).context.paths.state  # makes the owner's id
        before = self.seen(state)
        await self.status()
        self.assertEqual(self.seen(state), before)

    def seen(self, folder: Path) -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class MissingHalfTest(LocalCase):
    """One half fails, in every way, and the others are as they were."""

    def setUp(self) -> None:
        super().setUp()
        # Five seconds of patience in real life.
        patience = mock.patch.object(part, "_READ_PATIENCE_S", 0.3)
        patience.start()
        self.addCleanup(patience.stop)

    async def test_each_half_by_itself(self) -> None:
        words = {
            "refuses": "the place does not answer to {}",
            "breaks": "it could not be read (ZeroDivisionError",
            "hangs": "no answer within 0.3 s",
        }
        self.model()
        for verb in ("find", "room", "endpoint", "cost_so_far"):
            for fault, sentence in words.items():
                with self.subTest(verb=verb, fault=fault):
                    status = await self.status(self.faulty(**{verb: fault}))
                    why = {
                        "find": " ".join(status["notes"]),
                        "room": status["machine"]["missing"],
                        "endpoint": " ".join(status["notes"]),
                        "cost_so_far": status["cost"]["missing"],
                    }
                    self.assertIn(sentence.format(verb), why.pop(verb))
                    if verb == "find":
                        self.assertEqual(status["state"], "unknown")
                        self.assertEqual(status["next_step"], "get_system_status() again")
                        why.pop("endpoint")
                    if verb == "endpoint":
                        self.assertEqual(status["state"], "failed")
                        why.pop("find")
                    self.assertEqual(set(why.values()), {""}, "another half was lost as well")
                    self.assertEqual("ZeroDivisionError" in self.said, fault == "breaks")
                    self.assertNotIn("hf_AAAAAAAAAA11", self.said + json.dumps(status))

    async def test_a_half_that_is_missing_is_null_and_has_no_bar(self) -> None:
        status = await self.status(self.faulty(room="refuses", cost_so_far="refuses"))
        machine, cost = status["machine"], status["cost"]
        self.assertEqual(
            {machine[f"{name}_gb"] for name in ("memory_available", "memory_total", "disk_free")},
            {None},
        )
        self.assertEqual({cost["billed"], cost["usd_so_far"], cost["hours"]}, {None})
        self.assertEqual(len(status["summary"].splitlines()), 1)

    async def test_all_at_once(self) -> None:
        self.write_settings({"PORT": "no"})
        everything = dict.fromkeys(("find", "room", "endpoint", "cost_so_far"), "breaks")

        def spoil(context: Any) -> None:
            context.runtime.local_model = lambda _name: 1 / 0
            context.jobs.all = lambda: 1 / 0

        status = await self.status(self.faulty(**everything), spoil)
        self.assertEqual(status["state"], "unknown")
        self.assertIn("the jobs are not known", " ".join(status["notes"]))
        self.assertEqual(status["next_step"], STATUS_STEPS["settings"])

    async def test_a_runtime_that_breaks_costs_the_sum_alone(self) -> None:
        def spoil(context: Any) -> None:
            context.runtime.local_model = lambda _name: 1 / 0

        status = await self.status(prepare=spoil)
        self.assertIn("could not be read (ZeroDivisionError", status["memory"])
        self.assertEqual((status["state"], status["notes"]), ("stopped", []))

    async def test_a_plane_that_rents_and_cannot_say_what_it_costs(self) -> None:
        rig = replace(RIG, plane_words={"rental": "tpu"})
        cost = (await self.status(rig))["cost"]
        self.assertIsNone(cost["billed"])
        self.assertIn("cannot say what is billed", cost["missing"])


class RentedStatusTest(ImaginaryCase):
    """The imaginary rig: a machine that is billed, and an engine that counts."""

    async def status(self, caller: Caller) -> dict[str, Any]:
        status = await caller.ok("get_system_status")
        tools = {tool.name for tool in (await caller.client.list_tools()).tools}
        check_step(self, status, self.assembled().context.vocabulary, tools)
        return status

    def relabel(self, **labels: str) -> None:
        """Change the labels of what is rented behind the rig's back."""
        with self.world.changing() as world:
            for rental in world["rentals"]:
                rental["labels"] |= labels

    def age(self, hours: float) -> None:
        """Everything that is rented was rented earlier by so many hours."""
        with self.world.changing() as world:
            for rental in world["rentals"]:
                rental["created_unix"] -= hours * 3600

    async def test_without_a_machine_one_is_to_be_found(self) -> None:
        async with self.calling() as caller:
            status = await self.status(caller)
        self.assertEqual((status["state"], status["next_step"]), ("stopped", "find_tpu()"))
        self.assertEqual((status["cost"]["billed"], status["cost"]["missing"]), (False, ""))
        self.assertEqual(status["load"]["missing"], ["no model is ready"])

    async def test_a_machine_without_a_model_is_billed(self) -> None:
        async with self.calling() as caller:
            machine = (await caller.ok("create_tpu", zone=ZONE, hours=4))["machine"]
            self.age(hours=1)
            status = await self.status(caller)
        cost = status["cost"]
        self.assertEqual((status["state"], status["next_step"]), ("stopped", "serve_model()"))
        self.assertIs(cost["billed"], True)
        self.assertEqual(cost["what"], f"{machine['name']} in {ZONE}")
        self.assertEqual(cost["usd_per_hour"], 1.2)
        self.assertAlmostEqual(cost["hours"], 1.0, delta=0.05)
        self.assertAlmostEqual(cost["usd_so_far"], 1.2, delta=0.06)
        self.assertAlmostEqual(cost["life_used"], 0.2, delta=0.02)  # one hour, and four to come
        self.assertEqual(cost["ends_at"], machine["ends_at"])
        self.assertIn(f"1.20 USD, ends at {machine['ends_at']}", status["summary"])
        self.assertRegex(status["summary"], r"(?m)^time   ████·{16} 1\.0 h so far")

    async def test_a_machine_whose_price_nobody_knows(self) -> None:
        (self.rig_folder / "tpu.env").write_text(
            (self.rig_folder / "tpu.env").read_text() + "UNKNOWN_PRICE_OK=1\n"
        )
        async with self.calling() as caller:
            await caller.ok("create_tpu", zone=UNPRICED_ZONE)
            cost = (await self.status(caller))["cost"]
        self.assertIs(cost["billed"], True)
        self.assertEqual((cost["usd_per_hour"], cost["usd_so_far"]), (None, None))
        self.assertEqual(cost["missing"], "nobody knows its price")

    async def test_the_end_of_its_time(self) -> None:
        async with self.calling() as caller:
            await self.created(caller)
            self.relabel(expires=str(int(time.time()) + 600))
            status = await self.status(caller)
            self.assertRegex(" ".join(status["notes"]), r"ends in (9|10) min")
            self.assertEqual(status["next_step"], "serve_model()")
            self.relabel(expires=str(int(time.time()) - 7200))
            status = await self.status(caller)
            self.assertIn("is over since 2 h 0 min", " ".join(status["notes"]))
            self.assertEqual(
                (status["next_step"], status["cost"]["life_used"]), ("list_orphans()", 1.0)
            )
            orphans = await caller.ok("list_orphans")
            self.assertEqual(len(orphans["orphans"]), 1)
            self.relabel(expires="whenever")
            status = await self.status(caller)
            self.assertEqual((status["cost"]["ends_at"], status["cost"]["life_used"]), ("", None))

    async def test_a_place_that_does_not_answer_is_not_said_to_be_empty(self) -> None:
        async with self.calling() as caller:
            await self.created(caller)
            self.world.set_zone(ZONE, readable=False)
            status = await self.status(caller)
        self.assertIsNone(status["cost"]["billed"])
        self.assertIn(f"not read: {ZONE}", status["cost"]["missing"])
        self.assertNotEqual(status["next_step"], "find_tpu()")

    async def test_a_served_model_and_its_figures(self) -> None:
        async with self.calling() as caller:
            await self.created(caller)
            await caller.ok("serve_model", wait_s=30)
            try:
                await self.look_at_what_is_served(caller)
            finally:
                await caller.ok("stop_model")

    async def look_at_what_is_served(self, caller: Caller) -> None:
        await caller.ok("query_gemma4", prompt="What is the capital of France?")
        status = await self.status(caller)
        self.assertEqual(
            (status["state"], status["next_step"]), ("ready", "query_gemma4(prompt=…)")
        )
        load = status["load"]
        self.assertEqual((load["running"], load["waiting"], load["kv_used_share"]), (0, 0, 0.125))
        self.assertEqual((load["prompt_tokens_total"], load["generation_tokens_total"]), (8, 6))
        self.assertIsNone(load["preemptions_total"])
        self.assertRegex(status["summary"], r"(?m)^cache  ██·{18} 0 running, 0 waiting, 12% of")
        orders = Path(self.assembled().context.paths.state) / "metrics.txt"
        for order, why in (
            ("SILENT", "/metrics did not answer in 0.8 s"),
            ("STATUS 500", "/metrics answered 500"),
            ("STATUS 404", "no /metrics (404)"),
            ("<html>", "Prometheus"),
        ):
            with self.subTest(order):
                orders.write_text(order)
                status = await self.status(caller)
                self.assertEqual(status["state"], "ready", "the model answers all the same")
                self.assertEqual({status["load"][name] for name in FIGURES}, {None})
                self.assertIn(why, " ".join(status["load"]["missing"]))
        orders.write_text("vllm:num_requests_running 3\n")
        status = await self.status(caller)
        self.assertIn("\nload   3 running\n", status["summary"])
        self.relabel(owner="0" * 16)
        status = await self.status(caller)
        self.assertEqual((status["state"], status["next_step"]), ("failed", "get_vllm_logs()"))

    async def test_the_address_says_whether_it_takes_a_key_and_never_which(self) -> None:
        rig = self.assembled()
        async with self.calling(rig=rig) as caller:
            await self.created(caller)
            await caller.ok("serve_model", wait_s=30)
            try:
                self.assertIn("no key", (await caller.ok("get_vllm_endpoint"))["summary"])
                rig.context.runtime.api_key = lambda: "not-a-real-key-0123456789"
                answer = await caller.ok("get_vllm_endpoint")
                self.assertIn("with this rig's key", answer["summary"])
                self.assertNotIn("not-a-real-key", json.dumps(answer))
            finally:
                await caller.ok("stop_model")

    async def test_a_start_is_waited_for_in_the_words_of_the_engine(self) -> None:
        async with self.calling() as caller:
            await self.created(caller)
            await caller.ok("serve_model")
            status = await self.status(caller)
            try:
                self.assertIn(status["state"], ("starting", "ready"))
                if status["state"] == "starting":
                    self.assertEqual(status["next_step"], "wait_for_vllm_ready(wait_s=50)")
            finally:
                await caller.ok("stop_model")


class WordsTest(unittest.TestCase):
    def test_the_steps_are_a_closed_set_in_the_words_of_the_rig(self) -> None:
        words = {"ready": "jax", "logs": "jax_logs", "hardware": "gpu"}
        made = {situation: status_step(situation, words, "run-1") for situation in STATUS_STEPS}
        self.assertEqual(made["starting"], "wait_for_jax_ready(wait_s=50)")
        self.assertEqual(made["silent"], "get_jax_logs()")
        self.assertEqual(made["no machine"], "find_gpu()")
        self.assertEqual(made["busy"], "get_job(job_id='run-1', wait_s=50)")
        self.assertEqual(
            set(made.values()) - {made["busy"]},
            step_forms(words) - {"get_job(job_id='JOB', wait_s=50)"},
        )
        for step in made.values():
            self.assertNotRegex(step, r"destroy|terminate", "a status sends nobody to delete")

    def test_a_duration_has_its_two_largest_units(self) -> None:
        for seconds, words in (
            (-5, "0 s"),
            (0, "0 s"),
            (59.9, "59 s"),
            (60, "1 min"),
            (3599, "59 min"),
            (3600, "1 h 0 min"),
            (86_399, "23 h 59 min"),
            (86_400, "1 d 0 h"),
            (10 * 86_400 + 7200, "10 d 2 h"),
        ):
            self.assertEqual(age_words(seconds), words)

    def test_bars_stay_within_their_width(self) -> None:
        for available, filled in ((16.0, 0), (8.0, 10), (0.0, 20), (99.0, 0), (-3.0, 20)):
            machine = MachineHalf(
                place="x", memory_available_gb=available, memory_total_gb=16.0, disk_free_gb=0.0
            )
            _, line = status_lines("s", machine, EngineLoad(), CostHalf(billed=False))
            self.assertEqual((line.count("█"), line.count("·")), (filled, 20 - filled))
        for total in (0.0, None):
            machine = MachineHalf(place="x", memory_available_gb=1.0, memory_total_gb=total)
            lines = status_lines("s", machine, EngineLoad(), CostHalf(billed=False))
            self.assertEqual(lines, ["s"])

    def test_cost_by_the_hour(self) -> None:
        cost = cost_since("x", 1000.0, 2.0, 9000.0, 1000.0 + 5400)
        self.assertEqual((cost.hours, cost.usd, cost.expires_unix), (1.5, 3.0, 9000.0))
        self.assertIsNone(cost_since("x", 1000.0, None, None, 4600.0).usd)
        self.assertEqual(cost_since("x", 1000.0, 2.0, None, 900.0).usd, 0.0)  # a clock set back

    def test_cost_in_words(self) -> None:
        self.assertEqual(cost_words(CostHalf(billed=False)), "")
        self.assertEqual(cost_words(CostHalf(billed=None, missing="why")), "")
        self.assertEqual(
            cost_words(CostHalf(billed=True, hours=1.5)),
            "1.5 h so far, at an unknown price, without an end",
        )


if __name__ == "__main__":
    unittest.main()
