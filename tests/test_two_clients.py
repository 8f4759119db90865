"""Two servers of one rig at once, as two agents have them: one job, one model server, one truth."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from mcp import Client

from forge.suites.rig_case import RigCase, RigUnderTest, use_rig

RIG_FOLDER = Path(__file__).resolve().parent.parent / "local-pytorch-cpu-2b"
AT_ONCE = 10


def setUpModule() -> None:
    use_rig(RigUnderTest(RIG_FOLDER, {}))


class TwoClientsTests(RigCase):
    """Each server is a process of its own over stdio; what they share is on the disk."""

    async def all_at_once(
        self, clients: tuple[Client, ...], tool: str, each: int, **arguments: Any
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """`tool` called `each` times by each client, all at once: the results, the error texts."""
        calls = [client.call_tool(tool, arguments) for client in clients for _ in range(each)]
        answers = await asyncio.gather(*calls)
        good = [dict(answer.structured_content or {}) for answer in answers if not answer.is_error]
        bad = [answer.content[0].text for answer in answers if answer.is_error]
        return good, bad

    def events(self) -> list[str]:
        """The journal's events; a line that is not whole fails."""
        return [str(entry["event"]) for entry in self.journal()]

    async def test_twenty_starts_at_once_are_one(self) -> None:
        self.engine.script(load_s=0.5)
        asked, starts = self.events().count("serve asked"), len(self.engine.starts())
        async with self.over_stdio() as one, self.over_stdio("legacy") as two:
            good, bad = await self.all_at_once((one, two), "serve_model", AT_ONCE)
            # Who comes while another decides may be told to come back; he starts nothing.
            self.assertEqual([text for text in bad if not text.startswith("BUSY ")], [])
            self.assertGreaterEqual(len(good), 2)
            self.assertEqual(len({outcome["job_id"] for outcome in good}), 1, good)
            ready = await asyncio.gather(
                self.answer(one, "wait_for_model_ready"), self.answer(two, "wait_for_model_ready")
            )
            self.assertEqual([outcome["state"] for outcome in ready], ["ready", "ready"])
            self.assertEqual(len(self.processes("server")), 1)
            self.assertEqual(len(self.engine.starts()), starts + 1)
            self.assertEqual(self.events().count("serve asked"), asked + 1)
            self.assertEqual(len(list(self.state.rglob("journal.jsonl"))), 1)
            await self._both_say_the_same(one, two)
            await self._one_stops_the_other_knows(one, two)

    async def _both_say_the_same(self, one: Client, two: Client) -> None:
        first = await self.answer(one, "get_system_status")
        second = await self.answer(two, "get_system_status")
        for status in (first, second):  # what is free changes from one moment to the next
            for changing in ("memory", "machine"):
                self.assertTrue(status.pop(changing), changing)
            (status["summary"], *_bars) = status["summary"].splitlines()
        self.assertEqual(first, second)
        self.assertEqual([first["pid"]], self.processes("server"))
        for tool in ("get_endpoint", "get_model_details", "serve_model"):
            self.assertEqual(await self.answer(one, tool), await self.answer(two, tool), tool)
        answers, bad = await self.all_at_once((one, two), "query_gemma4", 5, prompt="both")
        self.assertEqual((len(answers), bad), (10, []))

    async def _one_stops_the_other_knows(self, one: Client, two: Client) -> None:
        await self.answer(one, "stop_model")
        self.assertEqual(self.processes("server"), [])
        status = await self.answer(two, "get_system_status")
        self.assertEqual((status["state"], status["pid"], status["notes"]), ("stopped", None, []))
        await self.refusal(two, "query_gemma4", "NOT_FOUND", prompt="hello")
        self.assertIn("nothing was running", (await self.text(two, "stop_model")).lower())

    async def test_both_follow_one_job_with_progress(self) -> None:
        self.engine.script(load_s=1.0)
        told: dict[str, list[str]] = {"one": [], "two": []}

        async def follow(name: str, client: Client, job_id: str) -> dict[str, Any]:
            async def tell(_progress: float, _total: float | None, message: str | None) -> None:
                told[name].append(message or "")

            result = await client.call_tool(
                "get_job", {"job_id": job_id, "wait_s": 50}, progress_callback=tell
            )
            return dict(result.structured_content or {})

        async with self.over_stdio() as one, self.over_stdio("legacy") as two:
            begun = await self.answer(one, "serve_model")
            jobs = await asyncio.gather(
                follow("one", one, begun["job_id"]), follow("two", two, begun["job_id"])
            )
            self.assertEqual([job["state"] for job in jobs], ["done", "done"])
            self.assertEqual(jobs[0], jobs[1])
            for name, messages in told.items():
                phases = {message.partition(":")[0] for message in messages}
                self.assertIn("load", phases, f"{name} was told {messages}")

    async def test_one_cancels_what_the_other_began(self) -> None:
        self.engine.script(never_listens=True)
        async with self.over_stdio() as one, self.over_stdio() as two:
            begun = await self.answer(one, "serve_model")
            waiting = asyncio.ensure_future(self.answer(one, "wait_for_model_ready"))
            await self.until(lambda: self.processes("server"), "the model server never began")
            job = await self.answer(two, "cancel_job", job_id=begun["job_id"])
            self.assertEqual(job["state"], "cancelled")
            self.assertEqual((await waiting)["state"], "stopped")
            await self.assert_all_gone()

    async def test_starts_and_stops_at_once_end_in_one_truth(self) -> None:
        async with self.over_stdio() as one, self.over_stdio() as two:
            for _ in range(2):
                await asyncio.gather(
                    *(one.call_tool("serve_model", {}) for _ in range(3)),
                    *(two.call_tool("stop_model", {}) for _ in range(3)),
                )
                await one.call_tool("wait_for_model_ready", {"wait_s": 50})
                first = await self.answer(one, "get_system_status")
                second = await self.answer(two, "get_system_status")
                self.assertEqual((first["state"], first["pid"]), (second["state"], second["pid"]))
                self.assertIn(first["state"], ("ready", "stopped"))
                running = [first["pid"]] if first["pid"] else []
                self.assertEqual(running, self.processes("server"))
            await self.answer(two, "stop_model")
            await self.assert_all_gone()
        for line in next(self.state.rglob("journal.jsonl")).read_text().splitlines():
            self.assertEqual(json.loads(line)["v"], 1)
