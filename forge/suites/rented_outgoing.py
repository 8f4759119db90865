"""What leaves a rented rig: no secret in any argument, metadata, log or answer; all of it bounded.

The Hugging Face token has one way: from the user's environment into the project's secret, and from
there onto the machine. Everything else that was written or sent is searched for it.
"""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from forge.suites.google_case import GoogleCase
from forge.suites.outgoing import CANARIES, OutgoingSuite
from forge.suites.raw_stdio import RawServer, call_fault
from forge.suites.rented_case import HELD_TOKEN
from forge.suites.rig_case import rig_under_test

_SMALL_BENCH = {
    **{"concurrency": [1], "context_tokens": [32], "output_tokens": 4},
    **{"requests_per_cell": 2, "seconds_per_cell": 5},
}
# Where the machine keeps the token until its container was made.
_TOKEN_FILE = "run/gemma4/token.env"


class RentedOutgoingSuite(GoogleCase, OutgoingSuite):
    """The shared suite, with everything that a machine and its provider were told."""

    def rent_and_wait(self, server: RawServer) -> dict[str, Any]:
        """A machine that serves, through `server`; its row."""
        made = server.call("create_tpu_vm_instance", {"zone": self.zone}, 60.0)
        self.assertEqual(call_fault(made), "")
        ready = server.call("wait_for_vllm_ready", {"wait_s": 50}, 60.0)
        self.assertEqual(call_fault(ready), "")
        self.assertEqual(ready["result"]["structuredContent"]["state"], "ready", ready)
        return dict(made["result"]["structuredContent"]["machine"])

    def call_all(self, server: RawServer) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every tool once, with arguments that it takes; what ends the machine comes last."""
        machine = self.google.held()["instances"][0]
        where = {"name": machine, "zone": self.zone}
        plan = server.call("plan_destroy", where)["result"]["structuredContent"]
        no_job = {"job_id": "serve-20260101-000000-abcdef"}
        arguments: dict[str, dict[str, Any]] = {
            "get_vllm_docker_logs": {"lines": 2000},
            "get_tpu_vm_serial_log": {"lines": 2000},
            "query_gemma4": {"prompt": "hello"},
            "query_gemma4_with_stats": {"prompt": "hello"},
            "create_tpu_vm_instance": {"zone": self.zone},
            "describe_tpu_vm_instance": where,
            "plan_destroy": where,
            "destroy_tpu_vm_instance": {**where, "token": plan["token"]},
            "reap_orphans": {"token": plan["token"]},
            "run_vllm_benchmark": _SMALL_BENCH,
            "get_job": no_job,
            "cancel_job": no_job,
        }
        last = "destroy_tpu_vm_instance"
        for tool in sorted(rig_under_test().tools, key=lambda tool: tool == last):
            answer = server.call(tool, arguments.get(tool, {}), 60.0)
            if tool == "run_vllm_benchmark":
                job = answer["result"]["structuredContent"]["job_id"]
                server.call("get_job", {"job_id": job, "wait_s": 50}, 60.0)
            yield tool, answer

    def test_30_megabytes_of_any_bytes_and_an_endless_line_in_the_log(self) -> None:
        """Three here: every byte of them crosses two programs and the tunnel."""
        noise = "\x1b[31mred\x1b[0m \x9b \u202e bidi \x00\n" * 20_000
        self.engine.script(log=noise + "x" * 3_000_000, answer="\x00\x1b[2J\u202e\x9b done")
        with self.server() as server:
            self.rent_and_wait(server)
            structured = 0
            for tool, answer in self.call_all(server):
                text = json.dumps(answer, ensure_ascii=False)
                bad = [c for c in text if ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c == "\u202e"]
                self.assertEqual(bad, [], tool)
                for escape in ("\\u0000", "\\u001b", "\\ud8"):
                    self.assertNotIn(escape, text, tool)
                structured += self._halves_agree(tool, answer["result"])
            self.assertGreaterEqual(structured, 12)
            self.assertTrue(server.answers_ping())
            self.assert_protocol_only(server)

    def test_the_end_of_a_noisy_log_is_what_is_shown(self) -> None:
        self.engine.script(log="noise\n" * 300_000 + "the last line of the noise")
        with self.server() as server:
            self.rent_and_wait(server)
            answer = server.call("get_vllm_docker_logs", {"lines": 2000})
        log = answer["result"]["content"][0]["text"]
        self.assertIn("the last line of the noise", log)
        self.assertLess(len(log), 40_000)

    def test_a_canary_in_the_environment_appears_nowhere(self) -> None:
        token, heard = CANARIES["HF_TOKEN"], []
        with self.server(**CANARIES) as server:
            self.assertEqual(call_fault(server.call("save_hf_token", {})), "")
            self.rent_and_wait(server)
            for pid in [server.process.pid, *super().processes()]:
                heard.append(json.dumps(psutil.Process(pid).cmdline()).encode())
            self.assertTrue(self.google.sent("GET", ":access"), "the machine asked for no secret")
            self.assertEqual(self.engine.starts()[-1]["environment"]["HF_TOKEN"], "given")
            self.assertFalse((self.host().root / _TOKEN_FILE).exists(), "its file was left")
            heard.append(json.dumps(self.host().machine()).encode())  # metadata, console and all
            for tool, answer in self.call_all(server):
                self.assertNotIn(token, json.dumps(answer), tool)
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(10)
            heard += server.lines
        added = self.google.secrets.payloads["hf-token"][1:]
        self.assertEqual({base64.b64decode(one).decode() for one in added}, {token})
        heard.append(repr(self.google.requests).encode())
        heard += [path.read_bytes() for path in self._written()]
        self.assertGreater(len(heard), 40)
        for name, canary in {**CANARIES, "the secret's old version": HELD_TOKEN}.items():
            for text in heard:
                self.assertNotIn(canary.encode(), text, name)
                self.assertNotIn(base64.b64encode(canary.encode()), text, name)

    def _written(self) -> Iterator[Path]:
        """Every file of the rig, of its user and of its machines, but docker's own record of the
        container: the real one keeps its environment there too, for root alone."""
        files = (path for path in self.place.rglob("*") if path.is_file())
        return (path for path in files if path.parts[-2:] != ("docker", "vllm.json"))

    def test_a_secret_that_others_say_does_not_pass_through(self) -> None:
        others = "hf_OTHERotherOTHERotherOTHERother02"
        mine = CANARIES["SOME_SERVICE_API_KEY"]
        said = f"the token is {others}, the key is {mine}. end"
        self.engine.script(answer=said, log=said)
        with self.server(**CANARIES) as server:
            self.rent_and_wait(server)
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
                if tool in ("query_gemma4", "get_vllm_docker_logs"):
                    self.assertIn("the token is [redacted]", text, tool)
