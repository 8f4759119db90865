"""The JAX server with a Gemma 4 that was taught to call tools and to think: what comes out of it.

On 2 cores of an AMD EPYC (Zen 4): 90 s to teach it, once, and 29 s of computing to serve and ask.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import unittest
from pathlib import Path
from typing import Any

import httpx2

from forge.parts.boundaries.probe_client import ProbeClient
from forge.parts.boundaries.probe_plan import ProbeFacts
from forge.parts.toolsets.probe_asking import ProbeAsker
from forge.parts.toolsets.probe_tool_calls import TOOL_SCENARIOS, probe_tool_scenario
from tests.engines.serving_host import stream_events
from tests.real.taught_gemma4 import SPOKEN, THOUGHT, kept_taught_gemma4, lessons
from tests.real.test_jax_server import Started

ROOM = ("--slots", "1", "--max-model-len", "512", "--chunk", "128", "--steps", "2")


class JaxTools(unittest.TestCase):
    server: Started
    http: httpx2.Client

    @classmethod
    def setUpClass(cls) -> None:
        held = tempfile.TemporaryDirectory()
        cls.addClassCleanup(held.cleanup)
        folder = kept_taught_gemma4()
        name = ("--served-model-name", "taught")
        cls.server = Started(folder, Path(held.name) / "log", *name, *ROOM)
        cls.addClassCleanup(cls.server.end)
        cls.http = httpx2.Client(base_url=cls.server.url, trust_env=False, timeout=120)
        cls.addClassCleanup(cls.http.close)

    def body(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        body = {"model": "taught", "messages": messages, "max_tokens": 256, "temperature": 0}
        response = self.http.post("/v1/chat/completions", json={**body, **fields})
        self.assertEqual(response.status_code, 200, response.text)
        return dict(response.json())

    def test_the_five_scenarios_pass(self) -> None:
        async def probed() -> dict[str, tuple[str, str]]:
            asker = ProbeAsker(ProbeClient(self.server.url), "taught", 120, ProbeFacts())
            found = {}
            for scenario in TOOL_SCENARIOS:
                judged = await probe_tool_scenario(asker, scenario)
                found[scenario.case] = (judged.verdict, judged.detail)
            return found

        told = asyncio.run(probed())
        verdicts = {case: verdict for case, (verdict, _) in told.items()}
        self.assertEqual(verdicts, dict.fromkeys(verdicts, "pass"), told)
        self.assertEqual(len(verdicts), 5)

    def test_calls_and_thoughts_in_a_stream(self) -> None:
        for given, said in lessons():
            asked = dict(given)
            messages = [{"role": "user", "content": asked.pop("question")}]
            fields: dict[str, Any] = {"tools": asked["tools"]} if "tools" in asked else {}
            fields["reasoning_effort"] = "high" if "enable_thinking" in asked else "none"
            body = {"model": "taught", "messages": messages, "temperature": 0, "stream": True}
            response = self.http.post("/v1/chat/completions", json={**body, **fields})
            deltas = [event["choices"][0]["delta"] for event in stream_events(response)]
            pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
            calls: list[str] = []
            for piece in pieces:
                if "id" in piece:
                    calls.append(piece["function"]["name"])
                else:
                    city = json.loads(piece["function"]["arguments"])["city"]
                    calls[-1] += f"{{city:{city}}}"
            words = "".join(delta.get("content", "") for delta in deltas)
            thought = "".join(delta.get("reasoning", "") for delta in deltas)
            spelt = "".join(f"<|tool_call>call:{call}<tool_call|>" for call in calls)
            spelt += f"<|channel>thought\n{thought}<channel|>" if thought else ""
            self.assertEqual(spelt + words, said.replace('<|"|>', ""))

    def test_thinking_is_told_beside_what_is_said(self) -> None:
        (question,) = {given["question"] for given, said in lessons() if said == SPOKEN}
        messages = [{"role": "user", "content": question}]
        told = self.body(messages, chat_template_kwargs={"enable_thinking": True})
        message = told["choices"][0]["message"]
        self.assertEqual((message["reasoning"], message["content"]), (THOUGHT, SPOKEN))
        self.assertGreater(told["usage"]["completion_tokens_details"]["reasoning_tokens"], 5)
        self.assertEqual(self.body(messages)["choices"][0]["message"]["content"], SPOKEN)


if __name__ == "__main__":
    unittest.main()
