"""One model server, every way in which an answer can go wrong: the class, the words, the next call.

The server was ready; what fails is the generation. Rows D24 to D31 of the fault matrix.
"""

from __future__ import annotations

from typing import Any

from mcp import Client

from forge.suites.rig_case import RigCase, spelled


class AnswerFaultSuite(RigCase):
    """No fault of an answer is passed on as an answer, and none ends the server."""

    keeps_running = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.serve_for_class()

    async def asyncTearDown(self) -> None:
        """Whatever happened: the model server lives, and with good behaviour all is well."""
        self.engine.script()
        self._let_wait("45")
        self.assertEqual(len(self.processes("server")), 1)
        async with self.in_process() as client:
            health = await self.answer(client, "verify_model_health")
            self.assertTrue(health["healthy"], health)
        await super().asyncTearDown()

    def _let_wait(self, seconds: str) -> None:
        """Set the longest wait for an answer, while the server runs."""
        self.write_settings(**self.good_settings(), QUERY_TIMEOUT_S=seconds)

    async def _measured(self, client: Client) -> dict[str, Any]:
        return await self.answer(client, "query_gemma4_with_stats", prompt="hello")

    async def _unhealthy(self, client: Client, why: str) -> None:
        health = await self.answer(client, "verify_model_health")
        self.assertFalse(health["healthy"], health)
        self.assertIn(why, health["reason"])
        self.assertIn(health["reason"], health["summary"])
        self.assertEqual(health["next_step"], f"{spelled('get_server_logs')}()")

    async def _broken(self, client: Client, why: str) -> None:
        """The three askers agree that the answer broke off: error, marked figures, not healthy."""
        text = await self.refusal(client, "query_gemma4", "PARTIAL", prompt="hello")
        self.assertIn(why, text)
        self.assertIn("Next: ", text)
        measured = await self._measured(client)
        self.assertFalse(measured["complete"])
        self.assertIn(why, measured["broke_off"])
        self.assertIn("broke off", measured["summary"])
        self.assertIsNone(measured["tokens_per_s"], "a rate of a broken stream")
        self.assertIsNone(measured["tpot_ms"], "a pace of a broken stream")
        await self._unhealthy(client, "broke off")

    async def test_a_stream_that_breaks_off(self) -> None:
        self.engine.script(fault="breaks off", answer="Paris is the capital")
        async with self.in_process() as client:
            await self._broken(client, "without a finish reason")
            self.assertEqual((await self._measured(client))["text"], "Paris")

    async def test_an_error_within_the_stream(self) -> None:
        self.engine.script(fault="error event", answer="Paris is the capital")
        async with self.in_process() as client:
            await self._broken(client, "out of pages")

    async def test_a_stream_that_stalls(self) -> None:
        self.engine.script(fault="stalls", answer="Paris is the capital")
        self._let_wait("3")
        async with self.in_process() as client:
            measured = await self._measured(client)
            self.assertFalse(measured["complete"])
            self.assertIn("within 3 s", measured["broke_off"])
            self.assertEqual(measured["text"], "Paris")

    async def test_no_first_token_in_time(self) -> None:
        self.engine.script(fault="stalls at once")
        self._let_wait("1.5")
        async with self.in_process() as client:
            text = await self.refusal(client, "query_gemma4", "TIMEOUT", prompt="hello")
            self.assertIn("QUERY_TIMEOUT_S", text)

    async def test_an_empty_answer(self) -> None:
        self.engine.script(fault="empty")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertIn("no text", answer["summary"])
            measured = await self._measured(client)
            self.assertIsNone(measured["ttft_s"], "a first token that never came")
            await self._unhealthy(client, "empty")

    async def test_an_answer_that_is_cut_off(self) -> None:
        self.engine.script(fault="cut", answer="The capital of that country is")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertEqual(answer["finish_reason"], "length")
            self.assertIn("cut off", answer["summary"])
            await self._unhealthy(client, "cut off")

    async def test_a_wrong_answer(self) -> None:
        self.engine.script(answer="Comparison shows that it is Lyon.")
        async with self.in_process() as client:
            await self._unhealthy(client, "wrong")

    async def test_every_request_is_refused(self) -> None:
        classes = {400: "INVALID", 401: "AUTH", 403: "AUTH", 404: "INVALID", 429: "BUSY"}
        classes |= {500: "INTERNAL", 502: "INTERNAL", 503: "BUSY"}
        async with self.in_process() as client:
            for status, error_class in classes.items():
                self.engine.script(fault=f"status {status}", words=f"reason {status}")
                for tool, extra in (
                    ("query_gemma4", {"prompt": "hello"}),
                    ("query_gemma4_with_stats", {"prompt": "hello"}),
                    ("verify_model_health", {}),
                ):
                    text = await self.refusal(client, tool, error_class, **extra)
                    self.assertIn(str(status), text)
                    if error_class != "AUTH":
                        self.assertIn(f"reason {status}", text)

    async def test_a_redirect_is_not_followed(self) -> None:
        self.engine.script(fault="status 307")
        seen = len(self.engine.requests())
        async with self.in_process() as client:
            await self.refusal(client, "query_gemma4", "DENIED", prompt="hello")
        self.assertEqual(len(self.engine.requests()), seen + 1)

    async def test_a_page_instead_of_a_stream(self) -> None:
        self.engine.script(fault="html")
        async with self.in_process() as client:
            for tool, extra in (
                ("query_gemma4", {"prompt": "hello"}),
                ("query_gemma4_with_stats", {"prompt": "hello"}),
                ("verify_model_health", {}),
            ):
                await self.refusal(client, tool, "DENIED", **extra)

    async def test_an_event_that_is_no_json(self) -> None:
        self.engine.script(fault="no json")
        async with self.in_process() as client:
            await self._broken(client, "no JSON")

    async def test_an_answer_cut_into_single_bytes(self) -> None:
        self.engine.script(fault="split")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertEqual(answer["text"], "Zürich 東京 😀")

    async def test_events_without_choices(self) -> None:
        self.engine.script(fault="empty choices")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertEqual((answer["text"], answer["completion_tokens"]), ("Good day.", 2))

    async def test_an_event_of_5_megabytes_is_an_event(self) -> None:
        self.engine.script(fault="5 MB line")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertEqual(answer["text"], "Good day.")

    async def test_an_answer_of_3_megabytes_comes_out_bounded(self) -> None:
        self.engine.script(fault="3 MB answer")
        async with self.over_stdio() as client:
            result = await client.call_tool("query_gemma4", {"prompt": "hello"})
            self.assertFalse(result.is_error, result.content)
            self.assertLess(len(result.model_dump_json()), 200_000)
            self.assertIn("left out", (result.structured_content or {})["text"])

    async def test_an_event_beyond_all_bounds_is_refused(self) -> None:
        self.engine.script(fault="20 MB line")
        async with self.in_process() as client:
            await self.refusal(client, "query_gemma4", "PARTIAL", prompt="hello")

    async def test_an_answer_full_of_control_characters(self) -> None:
        self.engine.script(answer="red \x1b[31mred \x00 \u202e \x9b31m end")
        for mode in ("auto", "legacy"):
            async with self.in_process(mode) as client:
                text = (await self.answer(client, "query_gemma4", prompt="hello"))["text"]
                self.assertTrue(text.startswith("red red") and text.endswith("end"), repr(text))
                self.assertFalse([c for c in text if ord(c) < 32 or c in "\x9b\u202e"], repr(text))
