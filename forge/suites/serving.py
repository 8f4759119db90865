"""The way of a model through its tools: serve, wait, ask, measure, look, stop, serve again."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path
from typing import Any

from forge.suites.rig_case import RigCase, rig_under_test, spelled

HEALTH_ANSWER = "Paris."


class ServingSuite(RigCase):
    """From nothing to an answer and back, as an agent does it."""

    architecture = "Gemma4ForCausalLM"  # of the small model, as its files name it

    async def test_the_whole_way_over_stdio(self) -> None:
        told: list[tuple[float, str]] = []

        async def tell(progress: float, total: float | None, message: str | None) -> None:
            self.assertEqual(total, 100)
            told.append((progress, message or ""))

        self.engine.script(load_s=0.6)
        async with self.over_stdio() as client:
            self.assertEqual((await self.answer(client, "get_system_status"))["state"], "stopped")
            begun = await self.answer(client, "serve_model")
            self.assertEqual(begun["state"], "starting")
            self.assertIn(spelled("wait_for_model_ready"), begun["next_step"])
            self.assertIsNone(begun["remaining_s"], "a time left before any start was measured")
            result = await client.call_tool(
                spelled("wait_for_model_ready"), {"wait_s": 50}, progress_callback=tell
            )
            ready = dict(result.structured_content or {})
            self.assertEqual(ready["state"], "ready", ready)
            self.assertEqual(ready["percent"], 100)
            self._progress_is_sound(told)
            await self._ask_everything(client)
            await self._stop_and_look(client)

    def _progress_is_sound(self, told: list[tuple[float, str]]) -> None:
        percentages = [progress for progress, _ in told]
        self.assertEqual(percentages, sorted(percentages), "progress went backwards")
        phases = list(dict.fromkeys(message.partition(":")[0] for _, message in told))
        order = [phase for phase in self.assembled().context.runtime.phases if phase in phases]
        self.assertEqual(phases[: len(order)], order)
        self.assertIn("load", phases)

    async def _ask_everything(self, client: Any) -> None:
        health = await self.answer(client, "verify_model_health")
        self.assertTrue(health["healthy"], health)
        self.assertEqual((health["answer"], health["model"]), (HEALTH_ANSWER, self.model))
        answer = await self.answer(
            client, "query_gemma4", prompt="two words", system="be short", max_tokens=7
        )
        self.assertEqual(answer["text"], "Good day.")
        self.assertEqual((answer["prompt_tokens"], answer["completion_tokens"]), (4, 2))
        self.assertEqual(answer["finish_reason"], "stop")
        sent = self.engine.requests()[-1]["body"]
        roles = [(message["role"], message["content"]) for message in sent["messages"]]
        self.assertEqual(roles, [("system", "be short"), ("user", "two words")])
        self.assertEqual((sent["max_tokens"], sent["temperature"]), (7, 0))
        details = await self.answer(client, "get_model_details")
        self.assertEqual(details["architecture"], self.architecture)
        self.assertEqual(details["folder"], self.model)
        self.assertIn("per-layer embedding", details["beside"])
        endpoint = await self.answer(client, "get_endpoint")
        address = f"http://127.0.0.1:{self.port}/v1"
        self.assertEqual((endpoint["base_url"], endpoint["model"]), (address, self.model))
        asked = urllib.request.Request(f"{address}/models", headers=self.engine.headers())
        with urllib.request.urlopen(asked, timeout=10) as reply:
            self.assertEqual(reply.status, 200)
        log = await self.text(client, "get_server_logs")
        self.assertIn("Loading weights: 100%", log)
        self.assertNotIn("Loading weights:  50%", log, "a progress bar's past is worth no line")

    async def _stop_and_look(self, client: Any) -> None:
        status = await self.answer(client, "get_system_status")
        self.assertEqual((status["state"], status["model"]), ("ready", self.model))
        self.assertEqual([status["pid"]], self.processes("server"))
        self.assertIn(f"is ready at {status['endpoint']}", status["summary"].splitlines()[0])
        for half in ("machine", "cost"):
            self.assertEqual(status[half]["missing"], "", half)
        figures = {name: value for name, value in status["load"].items() if name != "missing"}
        if None in figures.values():  # an engine that does not count everything says so
            self.assertTrue(status["load"]["missing"], figures)
        stopped = await self.answer(client, "stop_model")
        self.assertIn(str(status["pid"]), stopped["summary"])
        await self.assert_all_gone()
        again = await self.answer(client, "stop_model")
        self.assertIn("nothing was running", again["summary"].lower())
        for tool in ("query_gemma4", "query_gemma4_with_stats"):
            text = await self.refusal(client, tool, "NOT_FOUND", prompt="hello")
            self.assertIn("Next: serve_model()", text)
        for tool in ("get_endpoint", "verify_model_health"):
            self.assertIn("serve_model()", await self.refusal(client, tool, "NOT_FOUND"))
        self.assertIn("Loading weights", await self.text(client, "get_server_logs"))

    async def test_statistics_are_those_of_the_stream(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            self.engine.script(answer="one two three four five", pace_s=0.1)
            measured = await self.answer(client, "query_gemma4_with_stats", prompt="count")
        self.assertTrue(measured["complete"])
        self.assertEqual(measured["completion_tokens"], 5)
        # Five words, 0.1 s after each: the fourth gap ends at 0.4 s, the stream at 0.5 s or later.
        self.assertGreaterEqual(measured["total_s"], 0.5)
        self.assertGreaterEqual(measured["tpot_ms"], 95)
        self.assertLess(measured["ttft_s"], measured["total_s"] - 0.4)
        rate = measured["completion_tokens"] / measured["total_s"]
        self.assertAlmostEqual(measured["tokens_per_s"], rate, delta=0.1)

    async def test_a_second_start_knows_how_long_the_first_one_took(self) -> None:
        self.engine.script(load_s=0.7)
        async with self.in_process() as client:
            first = await self.serve(client)
            await self.answer(client, "stop_model")
            begun = await self.answer(client, "serve_model")
            remaining = []
            while (job := await self.answer(client, "get_job", job_id=begun["job_id"]))[
                "state"
            ] in ("queued", "running"):
                remaining.append(job["remaining_s"])
                await asyncio.sleep(0.1)
        known = [value for value in remaining if value is not None]
        self.assertTrue(known, f"no time left was ever told: {remaining}")
        self.assertGreater(known[0], 0.3)
        self.assertLess(known[0], first["seconds"] + 1)
        self.assertLess(known[-1], known[0])
        self.assertEqual(job["result"]["model"], self.model)

    async def test_a_second_call_reports_what_runs_and_starts_nothing(self) -> None:
        self.engine.script(load_s=0.8)
        async with self.in_process() as client, self.in_process("legacy") as other:
            first = await self.answer(client, "serve_model")
            second = await self.answer(other, "serve_model")
            self.assertEqual(second["job_id"], first["job_id"])
            busy = await self.refusal(client, "query_gemma4", "BUSY", prompt="now?")
            self.assertIn(first["job_id"], busy)
            await self.refusal(other, "serve_model", "EXISTS", model="embedded")
            await self.answer(client, "wait_for_model_ready")
            third = await self.answer(other, "serve_model")
            self.assertEqual(third["state"], "ready")
            text = await self.refusal(other, "serve_model", "EXISTS", model="embedded")
            self.assertIn("stop_model()", text)
        self.assertEqual(len(self.engine.starts()), len({s["pid"] for s in self.engine.starts()}))
        self.assertEqual(len(self.processes("server")), 1)

    async def test_stopping_while_it_starts_leaves_nothing(self) -> None:
        self.engine.script(never_listens=True)
        async with self.in_process() as client:
            begun = await self.answer(client, "serve_model")
            await self.until(lambda: self.processes("server"), "the model server never began")
            stopped = await self.answer(client, "stop_model")
            self.assertIn(begun["job_id"], stopped["summary"])
            await self.assert_all_gone()
            job = await self.answer(client, "get_job", job_id=begun["job_id"])
            self.assertEqual(job["state"], "cancelled")
            self.assertEqual((await self.answer(client, "get_system_status"))["state"], "stopped")

    async def test_cancelling_the_job_undoes_it(self) -> None:
        self.engine.script(never_listens=True)
        async with self.in_process() as client:
            begun = await self.answer(client, "serve_model")
            await self.until(lambda: self.processes("server"), "the model server never began")
            job = await self.answer(client, "cancel_job", job_id=begun["job_id"])
            self.assertEqual(job["state"], "cancelled")
            await self.assert_all_gone()
            again = await self.answer(client, "cancel_job", job_id=begun["job_id"])
            self.assertEqual(again["state"], "cancelled")
            self.assertEqual(
                (await self.answer(client, "wait_for_model_ready"))["state"], "stopped"
            )
            await self.refusal(
                client, "get_job", "NOT_FOUND", job_id="serve-20200101-000000-abcdef"
            )

    async def test_a_client_that_goes_away_stops_nothing(self) -> None:
        """And a model that is given as an argument wins over the one of the settings."""
        other = str(rig_under_test().make_model(self.place / "models" / "another one"))
        self.engine.script(load_s=0.3)
        async with self.in_process() as client:
            begun = await self.answer(client, "serve_model", model=other)
        async with self.in_process() as client:
            ready = await self.answer(client, "wait_for_model_ready")
            self.assertEqual((ready["state"], ready["job_id"]), ("ready", begun["job_id"]))
            self.assertEqual(ready["model"], other)
            self.assertEqual(self.engine.starts()[-1]["argv"][1], other)
            status = await self.answer(client, "get_system_status")
            self.assertEqual(status["model"], other)

    async def test_what_a_start_leaves_behind(self) -> None:
        """Files for this user alone, in the folders given; a server on loopback, kept offline."""
        async with self.in_process() as client:
            await self.serve(client)
        files = [path for path in self.state.rglob("*") if path.is_file()]
        self.assertGreater(len(files), 4)
        for path in files:
            if not path.name.endswith(".lock"):
                self.assertEqual(path.stat().st_mode & 0o077, 0, f"{path} can be read by others")
        written = {path.name for path in self.rig_folder.iterdir()} - {"__pycache__"}
        programs = {f"{name}.py" for name in self.module.RIG.programs}
        self.assertEqual(written, {"server.py", "tpu.env", *programs})
        self.assertEqual([p for p in Path(self.environment["HOME"]).iterdir()], [])
        start = self.engine.starts()[-1]
        argv = start["argv"]
        self.assertEqual(argv[argv.index("--host") + 1], "127.0.0.1")
        self.assertNotIn("--trust-remote-code", argv)
        self.assertEqual(start["environment"]["HF_HUB_OFFLINE"], "1")
