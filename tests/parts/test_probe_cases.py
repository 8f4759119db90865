"""Every probe against a scripted model over real HTTP: each verdict that it can give, provoked."""

from __future__ import annotations

import asyncio
import json
import socket
import unittest
from typing import Any

from forge.parts.boundaries.probe_client import ProbeClient
from forge.parts.boundaries.probe_plan import ProbeFacts
from forge.parts.knowledge.probe_report import MOST_EXCHANGES, ProbeVerdict
from forge.parts.toolsets.probe_asking import Judgement, ProbeAsker
from forge.parts.toolsets.probe_cases import PROBE_CASES, PROBE_GROUPS, planned_probes
from forge.parts.toolsets.probe_greedy import GREEDY_PROMPTS
from forge.parts.toolsets.probe_run import PROBE_RUNS
from forge.parts.toolsets.probe_vision import PROBE_COLOURS, two_halves_png
from tests.scripted_model import ScriptedModel, halves_of_png

LIMIT = 400
Provoked = dict[ProbeVerdict, tuple[dict[str, Any], ...]]

_REFUSED_CALL: tuple[dict[str, Any], ...] = ({"tools": "refused"}, {"tools": "error in 200"})
_MALFORMED: tuple[dict[str, Any], ...] = (
    {"tools": "no id"},
    {"tools": "object arguments"},
    {"tools": "bad json"},
)

# Case -> verdict -> the conducts of a server that must be given it.
EXPECTED: dict[str, Provoked] = {
    "tool_one_call": {
        "pass": ({},),
        "fail": ({"tools": "prose"}, {"tools": "twice"}, *_MALFORMED),
        "silent": ({"tools": "dropped"}, {"tools": "in text"}),
        "unsupported": _REFUSED_CALL,
    },
    "tool_right_of_two": {
        "pass": ({},),
        "fail": ({"tools": "other tool"}, {"tools": "prose"}, *_MALFORMED),
        "silent": ({"tools": "dropped"}, {"tools": "in text"}),
        "unsupported": _REFUSED_CALL,
    },
    "tool_none_needed": {
        "pass": ({}, {"tools": "prose"}),
        "fail": ({"tools": "always"}, {"tools": "silent word"}),
        "silent": ({"tools": "dropped"},),
        "unsupported": _REFUSED_CALL,
        "untested": ({"counts_tokens": False},),
    },
    "tool_two_parallel": {
        "pass": ({},),
        "fail": ({"tools": "one of two"}, {"tools": "twice"}, {"tools": "prose"}),
        "silent": ({"tools": "dropped"}, {"tools": "in text"}),
        "unsupported": _REFUSED_CALL,
    },
    "tool_missing_argument": {
        "pass": ({},),
        "fail": ({"tools": "invented"}, {"tools": "never asks"}, {"tools": "silent word"}),
        "silent": ({"tools": "dropped"},),
        "unsupported": _REFUSED_CALL,
        "untested": ({"counts_tokens": False},),
    },
    "schema_thinking_off": {
        "pass": ({}, {"thinking": "refused"}, {"counts_tokens": False}),
        "fail": ({"schema": "cut"},),
        "silent": (
            {"schema": "obeyed"},
            {"schema": "dropped"},
            {"schema": "with thinking only"},
            {"schema": "dropped", "thinking": "refused"},
        ),
        "unsupported": ({"schema": "refused"}, {"schema": "refused", "thinking": "refused"}),
        "untested": ({"schema": "in prompt"},),
    },
    "schema_thinking_on": {
        "pass": ({}, {"schema": "with thinking only"}),
        "fail": ({"schema": "cut"},),
        "silent": ({"schema": "obeyed"}, {"schema": "dropped"}),
        "unsupported": ({"schema": "refused"}, {"thinking": "refused"}),
        "untested": (
            {"schema": "in prompt"},
            {"thinking": "ignored"},
            {"schema": "thinks too long"},
        ),
    },
    "vision_picture": {
        "pass": ({}, {"picture": "warms up"}, {"counts_tokens": False}),
        "fail": ({"picture": "misread"},),
        "silent": ({"picture": "dropped"},),
        "unsupported": ({"picture": "refused"}, {"picture": "always 422"}),
    },
    "greedy_repeats": {"pass": ({},), "fail": ({"greedy": "varies"}, {"greedy": "empty"})},
    "context_at_limit": {
        "pass": ({}, {"above": "taken"}),
        "fail": ({"context_limit": LIMIT - 1},),
        "silent": ({"reads_at_most": LIMIT // 2}, {"reads_at_most": LIMIT - 17}),
        "untested": ({"counts_tokens": False}, {"tokens_per_word": 1.37}),
    },
    "context_above_limit": {
        "pass": ({},),
        "fail": ({"above": "other words"}, {"above": "broken"}),
        "silent": ({"above": "taken"}, {"above": "cut"}, {"context_limit": LIMIT + 1}),
        "untested": ({"counts_tokens": False}, {"tokens_per_word": 1.37}),
    },
}


class CasesCase(unittest.IsolatedAsyncioTestCase):
    model: ScriptedModel

    @classmethod
    def setUpClass(cls) -> None:
        cls.model = cls.enterClassContext(ScriptedModel())

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().slow_callback_duration = 60  # a busy machine is no news

    def asker(self, **facts: Any) -> ProbeAsker:
        known = {"context_limit": LIMIT, "limit_source": "test", **facts}
        return ProbeAsker(ProbeClient(self.model.url), "scripted", 30, ProbeFacts(**known))

    async def judged(self, case: str, asker: ProbeAsker) -> Judgement:
        return await PROBE_RUNS[case](asker)


class EveryVerdictTest(CasesCase):
    async def test_each_conduct_gets_its_verdict(self) -> None:
        for case, verdicts in EXPECTED.items():
            for verdict, conducts in verdicts.items():
                for conduct in conducts:
                    with self.subTest(case=case, conduct=conduct):
                        self.model.obey(**{"context_limit": 10_000, **self.limited(case, conduct)})
                        asker = self.asker()
                        judged = await self.judged(case, asker)
                        self.assertEqual(judged.verdict, verdict, judged.detail)
                        self.assertGreater(len(judged.detail), 10)
                        self.assertTrue(0 < len(asker.exchanges) <= MOST_EXCHANGES)
                        self.assertEqual(len(asker.exchanges), len(self.model.seen))

    def limited(self, case: str, conduct: dict[str, Any]) -> dict[str, Any]:
        """Only the context cases are about the server's limit."""
        return {"context_limit": LIMIT, **conduct} if case.startswith("context") else conduct

    def test_nothing_is_left_out(self) -> None:
        self.assertEqual(set(EXPECTED), {case.name for case in PROBE_CASES})
        self.assertEqual(set(EXPECTED), set(PROBE_RUNS))
        for case, verdicts in EXPECTED.items():
            self.assertIn("pass", verdicts, case)
            self.assertGreater(len(verdicts), 1, case)
        self.assertEqual([case.name for case in planned_probes(PROBE_GROUPS)], list(EXPECTED))

    async def test_no_model_server_passes_anything(self) -> None:
        for conduct in ({"plain": "error"}, {"plain": "html"}, {"plain": "error in 200"}):
            for case in EXPECTED:
                with self.subTest(case=case, conduct=conduct):
                    self.model.obey(**conduct)
                    judged = await self.judged(case, self.asker())
                    self.assertIn(judged.verdict, ("fail", "untested"), judged.detail)

    async def test_no_shape_of_an_answer_breaks_a_case(self) -> None:
        def choice(**message: Any) -> dict[str, Any]:
            return {"choices": [{"message": message}], "usage": {"prompt_tokens": -1}}

        shapes: tuple[dict[str, Any], ...] = (
            {"choices": "none"},
            {"choices": [None], "usage": "many"},
            {"error": 5},
            choice(content=["a", "list"], tool_calls={"function": "get_weather"}),
            choice(content="\ud800\x00", reasoning={"deep": True}),
            choice(content=None, tool_calls=[1, None, {"function": {"name": 5}}]),
            choice(
                tool_calls=[{"id": "1", "function": {"name": "get_weather", "arguments": "[]"}}]
            ),
            choice(content='{"code": ["x"], "city": 1}', finish_reason=["length"]),
            choice(content="[" * 100_000),
        )
        self.addCleanup(delattr, self.model, "body_of")
        for number, shape in enumerate(shapes):
            self.model.body_of = lambda _reply, s=shape: s  # type: ignore[method-assign, misc]
            for case in EXPECTED:
                with self.subTest(case=case, shape=number):
                    self.model.obey(context_limit=10_000)
                    asker = self.asker()
                    judged = await self.judged(case, asker)
                    verdicts = ("fail", "silent", "untested")
                    if case == "greedy_repeats" and asker.greedy and asker.greedy[0].size > 1:
                        verdicts = ("pass",)  # whatever it says, it says it again
                    self.assertIn(judged.verdict, verdicts, judged.detail)

    async def test_a_dead_server_leaves_everything_untested(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            client = ProbeClient(f"http://127.0.0.1:{free.getsockname()[1]}")
            for case in EXPECTED:
                with self.subTest(case=case):
                    facts = ProbeFacts(context_limit=LIMIT)
                    judged = await self.judged(case, ProbeAsker(client, "scripted", 5, facts))
                    self.assertEqual(judged.verdict, "untested", judged.detail)

    async def test_a_server_that_is_too_slow_leaves_everything_untested(self) -> None:
        self.model.obey(pause_s=2)
        for case in ("tool_one_call", "schema_thinking_off", "greedy_repeats", "context_at_limit"):
            with self.subTest(case=case):
                client = ProbeClient(self.model.url)
                facts = ProbeFacts(context_limit=LIMIT)
                judged = await self.judged(case, ProbeAsker(client, "scripted", 0.3, facts))
                self.assertEqual(judged.verdict, "untested", judged.detail)


class DetailsTest(CasesCase):
    async def test_what_was_never_claimed_is_not_asked(self) -> None:
        self.model.obey()
        judged = await self.judged("vision_picture", self.asker(vision=False))
        self.assertEqual((judged.verdict, self.model.seen), ("untested", []))
        judged = await self.judged("context_at_limit", self.asker(context_limit=None))
        self.assertEqual((judged.verdict, self.model.seen), ("untested", []))

    async def test_a_first_422_is_tried_once_more_and_only_once(self) -> None:
        for conduct, requests in (("warms up", 2), ("always 422", 2), ("seen", 1)):
            self.model.obey(picture=conduct)
            await self.judged("vision_picture", self.asker())
            with_picture = [b for b in self.model.seen if "image_url" in json.dumps(b)]
            self.assertEqual(len(with_picture), requests, conduct)

    async def test_the_limit_is_met_to_the_token(self) -> None:
        for limit in (120, 400, 1001):
            self.model.obey(context_limit=limit)
            at = self.asker(context_limit=limit)
            judged = await self.judged("context_at_limit", at)
            self.assertEqual(judged.verdict, "pass", judged.detail)
            last = self.model.seen[-1]
            self.assertEqual(at.exchanges[-1].prompt_tokens, limit - last["max_tokens"])
            above = self.asker(context_limit=limit)
            judged = await self.judged("context_above_limit", above)
            self.assertEqual(judged.verdict, "pass", judged.detail)
            # The server's own refusal tells how much was asked for.
            self.assertIn(f"{limit + 1} were asked for", above.exchanges[-1].answer)

    async def test_a_bend_in_the_count_is_corrected_and_still_met(self) -> None:
        # The short prompts, by which the length is fitted, do not show it.
        self.model.obey(context_limit=4000, above="taken")
        original = self.model._prompt_tokens

        def bent(body: dict[str, Any], text: str, picture: bytes | None) -> int:
            tokens = original(body, text, picture)
            return tokens - (5 if tokens > 1000 else 0)

        self.model._prompt_tokens = bent  # type: ignore[method-assign]
        self.addCleanup(setattr, self.model, "_prompt_tokens", original)
        asker = self.asker(context_limit=4000)
        judged = await self.judged("context_at_limit", asker)
        self.assertEqual(judged.verdict, "pass", judged.detail)
        self.assertEqual(asker.exchanges[-1].prompt_tokens, 4000 - 16)

    async def test_greedy_prompts_are_asked_twice_and_greedily(self) -> None:
        self.model.obey()
        asker = self.asker()
        await self.judged("greedy_repeats", asker)
        asked = [body["messages"][0]["content"] for body in self.model.seen]
        self.assertEqual(asked, list(GREEDY_PROMPTS.values()) * 2)
        self.assertEqual({body["temperature"] for body in self.model.seen}, {0.0})
        self.assertEqual(len({text.sha256 for text in asker.greedy}), 6)

    async def test_the_schema_changes_with_every_run_and_is_not_in_the_prompt(self) -> None:
        words = []
        for _ in range(2):
            self.model.obey()
            await self.judged("schema_thinking_off", self.asker())
            body = self.model.seen[0]
            schema = body["response_format"]["json_schema"]["schema"]
            words.append(schema["properties"]["code"]["enum"])
            for word in words[-1]:
                self.assertNotIn(word, json.dumps(body["messages"]))
        self.assertEqual(len({*words[0], *words[1]}), 6)

    async def test_thinking_is_switched_as_named(self) -> None:
        for case, wanted in (("schema_thinking_on", True), ("schema_thinking_off", False)):
            self.model.obey()
            await self.judged(case, self.asker())
            switch = self.model.seen[0]["chat_template_kwargs"]
            self.assertEqual(switch, {"enable_thinking": wanted})

    async def test_evidence_is_bounded_and_holds_no_secret(self) -> None:
        self.model.obey(context_limit=60_000)
        asker = self.asker(context_limit=60_000)
        await self.judged("context_at_limit", asker)
        self.assertTrue(all(len(e.request) <= 2000 for e in asker.exchanges))
        self.assertGreater(max(len(json.dumps(body)) for body in self.model.seen), 100_000)
        self.model.obey(plain="error in 200")
        body = {"error": {"message": "key sk-" + "0123456789abcdef" * 2}}
        self.model.body_of = lambda reply: body  # type: ignore[method-assign, assignment]
        self.addCleanup(delattr, self.model, "body_of")
        judged = await self.judged("tool_one_call", asker)
        self.assertNotIn("0123456789abcdef", judged.detail + asker.exchanges[-1].answer)

    def test_the_picture_is_a_png_that_another_decoder_reads(self) -> None:
        for upper in PROBE_COLOURS:
            for lower in PROBE_COLOURS:
                self.assertEqual(halves_of_png(two_halves_png(upper, lower)), (upper, lower))


if __name__ == "__main__":
    unittest.main()
