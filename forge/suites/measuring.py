"""Measuring on the rig: from run_benchmark to the picture, the plan on paper, the probes.

The model is the scripted one, so figures mean nothing here; that they are right is tested where the
load generator is made.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from typing import Any

from mcp import Client

from forge.suites.rig_case import RigCase

_PNG = b"\x89PNG\r\n"


class MeasuringSuite(RigCase):
    """What is measured becomes a report, and what is not known is not said."""

    keeps_running = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.serve_for_class()

    async def bench_name(self, client: Client) -> str:
        """This rig's own name of run_benchmark."""
        tools = (await client.list_tools()).tools
        return next(tool.name for tool in tools if tool.name.startswith("run_"))

    async def measured(self, client: Client, **arguments: Any) -> dict[str, Any]:
        """A small benchmark, run to its end; the finished job."""
        small = {"concurrency": [1, 2], "context_tokens": [64], "output_tokens": 4}
        small |= {"requests_per_cell": 4, "seconds_per_cell": 5}
        begun = await self.answer(client, await self.bench_name(client), **{**small, **arguments})
        return await self.followed(client, begun["job_id"])

    async def followed(self, client: Client, job_id: str) -> dict[str, Any]:
        job = await self.answer(client, "get_job", job_id=job_id, wait_s=50)
        while job["state"] in ("queued", "running"):
            job = await self.answer(client, "get_job", job_id=job_id, wait_s=50)
        return job

    async def test_from_the_benchmark_to_the_picture(self) -> None:
        async with self.in_process() as client:
            job = await self.measured(client)
            self.assertEqual(job["state"], "done", job)
            name = job["result"]["report"]
            listed = await self.answer(client, "list_reports")
            self.assertEqual(listed["reports"][0]["name"], name)
            page = await self.text(client, "show_report", name=name)
            self.assertIn("c2", page)
            shown = await client.call_tool("show_report", {"name": name, "view": "curves"})
        (picture,) = [item for item in shown.content if item.type == "image"]
        self.assertTrue(base64.b64decode(picture.data).startswith(_PNG))
        files = list(self.state.rglob(f"{name}.json"))
        self.assertEqual(len(files), 1, "the report lies in the state folder, and once")
        report = json.loads(files[0].read_text())
        self.assertEqual(report["run"]["rig"], self.module.RIG.name)
        self.assertEqual(report["planned_cells"], 2)
        self.assertTrue(report["workload"]["tool_version"].startswith(self.module.RIG_VERSION))
        self.assertNotIn(str(self.place), files[0].read_text(), "a path of this computer got out")
        kept = {path.name for path in self.rig_folder.iterdir()}
        self.assertNotIn("benchmarks", kept, "a copy that is no checkout got files")

    async def test_two_reports_of_one_build_are_compared(self) -> None:
        async with self.in_process() as client:
            names = [(await self.measured(client))["result"]["report"] for _ in range(2)]
            self.assertNotEqual(names[0], names[1])
            both = await self.answer(client, "compare_reports", first=names[0], second=names[1])
        self.assertEqual(both["blocking"], [])

    async def test_an_engine_that_fails_is_reported_as_failing(self) -> None:
        self.engine.script(fault="status 500")
        async with self.in_process() as client:
            job = await self.measured(client, save_result=False)
            listed = await self.answer(client, "list_reports")
        said = json.dumps(job)
        self.assertIn("500", said)
        self.assertNotIn("tok/s", said.replace("0.0 tok/s", ""), "a failed cell has a rate")
        self.assertFalse([line for line in listed["reports"] if line["fault"]])

    async def test_the_own_plan_and_one_that_arithmetic_refuses(self) -> None:
        async with self.in_process() as client:
            own = await self.answer(client, "plan_deployment")
            big = await self.answer(client, "plan_deployment", model="31B", hardware="v5e1")
            self.assertFalse(big["fits"])
            self.assertEqual(big["verdict"], "refused by arithmetic")
            self.assertTrue(big["reasons"])
            small = await self.answer(
                client, "plan_deployment", model="E2B", hardware="v6e1", engine="vllm"
            )
        self.assertGreater(own["memory_bytes"]["weights, all"], 0)
        self.assertTrue(small["fits"], small["reasons"])
        self.assertGreater(small["usd"]["per hour"], 0)

    async def test_the_probes_judge_and_keep_their_evidence(self) -> None:
        async with self.in_process() as client:
            begun = await self.answer(client, "probe_capabilities", cases=["determinism"])
            job = await self.followed(client, begun["job_id"])
        self.assertEqual(job["state"], "done", job)
        self.assertEqual(job["result"]["verdicts"]["greedy_repeats"], "pass")

    async def test_two_measurements_at_once_are_refused(self) -> None:
        self.engine.script(pace_s=0.2)
        async with self.in_process() as client:
            tool = await self.bench_name(client)
            first = await self.answer(client, tool, concurrency=[1], context_tokens=[64])
            for other in (tool, "probe_capabilities"):
                text = await self.refusal(client, other, "BUSY")
                self.assertIn(first["job_id"], text)
            await self.answer(client, "cancel_job", job_id=first["job_id"])
        await self.until(lambda: not self.processes("job"), "the cancelled job's worker is left")

    def test_the_load_generator_by_hand_says_what_it_needs(self) -> None:
        for words, wanted in (([], "usage"), ([str(self.place)], "holds no plan")):
            done = subprocess.run(
                [sys.executable, str(self.rig_folder / "loadgen.py"), *words],
                env=self.environment,
                capture_output=True,
                text=True,
            )
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(wanted, done.stderr)
            self.assertNotIn("Traceback", done.stderr)
