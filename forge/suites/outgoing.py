"""What leaves the rig: JSON-RPC and nothing else on its output, no secret anywhere, all bounded."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from forge.suites.raw_stdio import RawServer, call_fault, raw_server
from forge.suites.rig_case import RigCase, rig_under_test, spelled

FRAME_LIMIT = 200_000  # bytes of one answer: text and structure, each bounded

# A token of the Hub's form, one that only its variable's name gives away, a cloud's.
CANARIES = {
    "HF_TOKEN": "hf_CANARYcanaryCANARYcanaryCANARY01",
    "SOME_SERVICE_API_KEY": "canary plain words 4711",
    "AWS_SECRET_ACCESS_KEY": "CANARY/aws/0123456789abcdefghijk",
}


class OutgoingSuite(RigCase):
    """Standard output is the protocol's alone, and secrets stay where they were."""

    @contextmanager
    def server(self, **environment: str) -> Iterator[RawServer]:
        surroundings = {**self.environment, **environment}
        with raw_server(self.server_file, surroundings, self.stderr_file) as server:
            yield server

    def assert_protocol_only(self, server: RawServer) -> None:
        """Every line of output is one JSON-RPC message, and none is beyond its bounds."""
        self.assertGreater(len(server.lines), 1)
        for line in server.lines:
            message = json.loads(line)
            self.assertEqual(message["jsonrpc"], "2.0")
            self.assertTrue("result" in message or "error" in message or "method" in message)
            self.assertLess(len(line), FRAME_LIMIT)

    def call_all(self, server: RawServer) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every tool once, with arguments that it takes; what ends the model comes last."""
        arguments: dict[str, dict[str, Any]] = {
            spelled("get_server_logs"): {"lines": 2000},
            "query_gemma4": {"prompt": "hello"},
            "query_gemma4_with_stats": {"prompt": "hello"},
            "get_job": {"job_id": "serve-20260101-000000-abcdef"},
            "cancel_job": {"job_id": "serve-20260101-000000-abcdef"},
        }
        tools = sorted(rig_under_test().tools, key=lambda tool: tool == "stop_model")
        for tool in tools:
            yield tool, server.call(tool, arguments.get(tool, {}))

    def test_30_megabytes_of_any_bytes_and_an_endless_line_in_the_log(self) -> None:
        self.engine.script(
            noise=30_000_000, log="x" * 3_000_000, answer="\x00\x1b[2J\u202e\x9b done"
        )
        with self.server() as server:
            answer = server.call("serve_model", {"wait_s": 50})
            self.assertEqual(answer["result"]["structuredContent"]["state"], "ready")
            structured = 0
            for tool, answer in self.call_all(server):
                text = json.dumps(answer, ensure_ascii=False)
                bad = [c for c in text if ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c == "\u202e"]
                self.assertEqual(bad, [], tool)
                for escape in ("\\u0000", "\\u001b", "\\ud8"):
                    self.assertNotIn(escape, text, tool)
                structured += self._halves_agree(tool, answer["result"])
            self.assertGreaterEqual(structured, 8)
            self.assertTrue(server.answers_ping())
            self.assert_protocol_only(server)

    def _halves_agree(self, tool: str, result: dict[str, Any]) -> bool:
        """Whether there is a structure; text and structure then say the same to each client."""
        structure = result.get("structuredContent")
        if structure is None:
            return False
        text = result["content"][0]["text"]
        self.assertTrue(text.startswith(structure["summary"]), tool)
        if structure["next_step"]:
            self.assertTrue(text.endswith(f"Next: {structure['next_step']}"), tool)
        return True

    def test_the_end_of_a_noisy_log_is_what_is_shown(self) -> None:
        self.engine.script(noise=3_000_000, crash="out of luck")
        with self.server() as server:
            fault = call_fault(server.call("serve_model", {"wait_s": 50}))
            self.assertIn("RuntimeError: out of luck", fault)
            answer = server.call(spelled("get_server_logs"), {"lines": 2000})
            log = answer["result"]["content"][0]["text"]
            self.assertIn("the last line of the noise", log)
            self.assertTrue(log.rstrip().endswith("RuntimeError: out of luck"), log[-200:])
            self.assertIn("left out", log)
            self.assertLess(len(log), 40_000)

    def test_a_canary_in_the_environment_appears_nowhere(self) -> None:
        heard: list[bytes] = []
        with self.server(**CANARIES) as server:
            self.assertEqual(call_fault(server.call("serve_model", {"wait_s": 50})), "")
            (pid,) = self.processes("server")
            model_server = psutil.Process(pid)
            heard.append(json.dumps(model_server.environ()).encode())
            heard.append(json.dumps(model_server.cmdline()).encode())
            called = [tool for tool, _ in self.call_all(server)]
            self.assertEqual(called[-1], "stop_model")
            self.engine.script(crash="no good")
            self.assertTrue(call_fault(server.call("serve_model", {"wait_s": 50})))
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(10)
            heard += server.lines
        for path in self.place.rglob("*"):
            with contextlib.suppress(OSError):  # a folder, or what a worker took away meanwhile
                heard.append(path.read_bytes())
        self.assertGreater(len(heard), 30)
        for name, canary in CANARIES.items():
            for text in heard:
                self.assertNotIn(canary.encode(), text, name)
                self.assertNotIn(json.dumps(canary)[1:-1].encode(), text, name)

    def test_a_secret_that_others_say_does_not_pass_through(self) -> None:
        others = "hf_OTHERotherOTHERotherOTHERother02"
        mine = CANARIES["SOME_SERVICE_API_KEY"]
        said = f"the token is {others}, the key is {mine}. end"
        self.engine.script(answer=said, log=said)
        with self.server(**CANARIES) as server:
            self.assertEqual(call_fault(server.call("serve_model", {"wait_s": 50})), "")
            self.engine.script(fault="status 500", words=said)
            fault = call_fault(server.call("query_gemma4", {"prompt": "hello"}))
            self.assertTrue(fault.startswith("INTERNAL "), fault)
            self.assertIn("the token is [redacted]", fault)
            self.assertNotIn(others, fault)
            self.assertNotIn(mine, fault)
            self.engine.script(answer=said)
            for tool, answer in self.call_all(server):
                text = json.dumps(answer)
                self.assertNotIn(others, text, tool)
                self.assertNotIn(mine, text, tool)
                if tool in ("query_gemma4", spelled("get_server_logs")):
                    self.assertIn("the token is [redacted]", text, tool)
