"""What leaves a rig on EC2: no secret in any argument, tag, user data, log or answer.

The Hugging Face token has one way: from the user's environment into the account's secret, and from
there onto the machine. Everything else that was written or sent is searched for it.
"""

from __future__ import annotations

import base64
import gzip
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from forge.suites.ec2_orders import Ec2OrderCase
from forge.suites.outgoing import CANARIES, OutgoingSuite
from forge.suites.raw_stdio import RawServer, call_fault
from forge.suites.rented_case import HELD_TOKEN
from forge.suites.rig_case import rig_under_test, spelled

_SMALL_GRID = {
    **{"concurrency": [1], "context_tokens": [32], "output_tokens": 4},
    **{"requests_per_cell": 2, "seconds_per_cell": 5},
}
# The SDK's own key stays the fake's: with another one nothing could be asked.
_EC2_CANARIES = {name: one for name, one in CANARIES.items() if not name.startswith("AWS_")}
_KEY_OF_THE_SDK = "made-up-for-a-test"  # what AWS_SECRET_ACCESS_KEY holds here


class Ec2OutgoingSuite(Ec2OrderCase, OutgoingSuite):
    """The shared suite, with everything that a machine and AWS were told."""

    def rent_and_wait(self, server: RawServer) -> dict[str, Any]:
        """A machine that serves, through `server`; its row."""
        made = server.call(spelled("create_tpu_vm_instance"), {"zone": self.zone}, 60.0)
        self.assertEqual(call_fault(made), "")
        for _ in range(2):  # a busy computer may need a second wait
            ready = server.call(spelled("wait_for_model_ready"), {"wait_s": 50}, 60.0)
            self.assertEqual(call_fault(ready), "")
            if ready["result"]["structuredContent"]["state"] == "ready":
                break
        self.assertEqual(ready["result"]["structuredContent"]["state"], "ready", ready)
        return dict(made["result"]["structuredContent"]["machine"])

    def call_all(self, server: RawServer) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every tool once, with arguments that it takes; what ends the machine comes last."""
        where = {"name": self.rented()["instances"][0], "zone": self.zone}
        plan = server.call("plan_destroy", where)["result"]["structuredContent"]
        no_job = {"job_id": "serve-20260101-000000-abcdef"}
        bench, last = spelled("run_benchmark"), spelled("destroy_tpu_vm_instance")
        arguments: dict[str, dict[str, Any]] = {
            spelled("get_server_logs"): {"lines": 2000},
            spelled("get_tpu_vm_serial_log"): {"lines": 2000},
            "query_gemma4": {"prompt": "hello"},
            "query_gemma4_with_stats": {"prompt": "hello"},
            spelled("create_tpu_vm_instance"): {"zone": self.zone},
            spelled("describe_tpu_vm_instance"): where,
            "plan_destroy": where,
            last: {**where, "token": plan["token"]},
            "reap_orphans": {"token": plan["token"]},
            bench: _SMALL_GRID,
            "get_job": no_job,
            "cancel_job": no_job,
        }
        for tool in sorted(rig_under_test().tools, key=lambda tool: tool == last):
            answer = server.call(tool, arguments.get(tool, {}), 60.0)
            if tool == bench:
                job = answer["result"]["structuredContent"]["job_id"]
                server.call("get_job", {"job_id": job, "wait_s": 50}, 60.0)
            yield tool, answer

    def test_30_megabytes_of_any_bytes_and_an_endless_line_in_the_log(self) -> None:
        """Three here: Systems Manager brings 24,000 characters of it, and the machine reads all."""
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
            answer = server.call(spelled("get_server_logs"), {"lines": 2000})
        log = answer["result"]["content"][0]["text"]
        self.assertIn("the last line of the noise", log)
        self.assertLess(len(log), 40_000)

    def test_a_canary_in_the_environment_appears_nowhere(self) -> None:
        token, heard = CANARIES["HF_TOKEN"], []
        with self.server(**_EC2_CANARIES) as server:
            self.assertEqual(call_fault(server.call("save_hf_token", {})), "")
            self.rent_and_wait(server)
            for pid in [server.process.pid, *super().processes()]:
                heard.append(json.dumps(psutil.Process(pid).cmdline()).encode())
            asked = [words for words in self.host().programs() if "get-secret-value" in words]
            self.assertTrue(asked, "the machine asked for no secret")
            self.assertEqual(self.engine.starts()[-1]["environment"]["HF_TOKEN"], "given")
            self.assertEqual(list((self.host().root / "run/gemma4").glob("*.env")), [])
            heard += self._told_the_machine()
            for tool, answer in self.call_all(server):
                self.assertNotIn(token, json.dumps(answer), tool)
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(10)
            heard += server.lines
        self.assertEqual(self.cloud.secret("us-east-2", "hf-token"), token)
        heard.append(repr(self.cloud.requests).encode())
        heard += [path.read_bytes() for path in self._written()]
        self.assertGreater(len(heard), 40)
        self._nowhere(heard, {**_EC2_CANARIES, "the secret's old version": HELD_TOKEN})
        mine = [text for text in heard if _KEY_OF_THE_SDK.encode() in text]
        self.assertEqual(mine, [], "the SDK's key got out")

    def _nowhere(self, heard: list[bytes], canaries: dict[str, str]) -> None:
        for name, canary in canaries.items():
            for text in heard:
                self.assertNotIn(canary.encode(), text, name)
                self.assertNotIn(base64.b64encode(canary.encode()), text, name)

    def _told_the_machine(self) -> Iterator[bytes]:
        """Its user data unpacked, its tags, its console, and what its programs were called with."""
        for order in self.orders():
            yield gzip.decompress(order.user_data)
            yield json.dumps(order.tags).encode()
            yield json.dumps({k: v for k, v in order.given.items() if k != "UserData"}).encode()
        yield self.host().console().encode()
        yield json.dumps(self.host().programs()).encode()
        for session in self.cloud.sent("SendCommand"):
            yield json.dumps(session.parameters).encode()

    def _written(self) -> Iterator[Path]:
        """Every file of the rig, of its user and of its machines; but the credentials that are the
        user's own, and docker's own record of the container: the real one keeps its environment
        there too, for root alone."""
        for path in self.place.rglob("*"):
            own = path.parts[-2:] in (("docker", "vllm.json"), ("aws", "aws-credentials"))
            if path.is_file() and not own:
                yield path

    def test_a_secret_that_others_say_does_not_pass_through(self) -> None:
        others = "hf_OTHERotherOTHERotherOTHERother02"
        mine = CANARIES["SOME_SERVICE_API_KEY"]
        said = f"the token is {others}, the key is {mine}. end"
        self.engine.script(answer=said, log=said)
        with self.server(**_EC2_CANARIES) as server:
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
                if tool in ("query_gemma4", spelled("get_server_logs")):
                    self.assertIn("the token is [redacted]", text, tool)
