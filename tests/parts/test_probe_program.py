"""probe.py in a process of its own: a plan in, events out, and what the server makes of them.

The program is real and asks a scripted model over HTTP.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from forge.parts.boundaries.probe_plan import ProbeEvent, ProbeFacts, ProbePlan
from forge.parts.knowledge.probe_report import ProbeExchange
from forge.parts.toolsets.probe_cases import PROBE_CASES, PROBE_GROUPS, planned_probes
from forge.parts.toolsets.probe_found import ProbeFound
from forge.parts.toolsets.probe_greedy import GREEDY_SET
from forge.parts.toolsets.probe_run import PROBE_RUNS
from tests.probing_rig import write_probe_program
from tests.scripted_model import ScriptedModel

PATIENCE_S = 90.0
EXCHANGE = {"what": "w", "request": "r", "status": 200, "answer": "a", "seconds": 1.0}


class ProgramCase(unittest.TestCase):
    model: ScriptedModel

    @classmethod
    def setUpClass(cls) -> None:
        cls.model = cls.enterClassContext(ScriptedModel())

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        write_probe_program(self.folder)
        self.run_folder = self.folder / "run"
        self.run_folder.mkdir()
        self.model.obey(context_limit=4096)

    def plan(self, *cases: str, url: str = "", **changes: Any) -> None:
        plan = ProbePlan(
            base_url=url or self.model.url,
            model="scripted",
            cases=list(cases),
            timeout_s=30,
            facts=ProbeFacts(context_limit=4096, limit_source="a test"),
            **changes,
        )
        (self.run_folder / "plan.json").write_text(plan.model_dump_json())

    def run_it(
        self, *words: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(self.folder / "probe.py"), *(words or [str(self.run_folder)])],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def told(self) -> str:
        path = self.run_folder / "events.jsonl"
        return path.read_text() if path.exists() else ""

    def events(self) -> list[ProbeEvent]:
        return [ProbeEvent.model_validate_json(line) for line in self.told().splitlines()]

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)


class WholeRunTest(ProgramCase):
    def test_every_case_is_begun_asked_and_judged_in_the_plans_order(self) -> None:
        names = [case.name for case in planned_probes(PROBE_GROUPS)]
        self.plan(*names)
        done = self.run_it()
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))
        events = self.events()
        self.assertEqual([event.case for event in events if event.event == "begun"], names)
        self.assertEqual([event.case for event in events if event.event == "judged"], names)
        self.assertEqual([event.event for event in events[:2]], ["asking", "answered"])
        self.assertEqual((events[0].what, events[-1].event), ("a plain question", "end"))
        asked = sum(event.event == "asking" for event in events)
        self.assertEqual(asked, sum(event.event == "answered" for event in events))
        self.assertEqual(asked, len(self.model.seen))
        times = [event.at_s for event in events]
        self.assertEqual(times, sorted(times))

    def test_the_server_reads_it_as_findings_with_their_evidence(self) -> None:
        self.plan("tool_none_needed", "greedy_repeats")
        self.assertEqual(self.run_it().returncode, 0)
        found = ProbeFound(self.run_folder)
        events = found.news()
        self.assertEqual(found.news(), [])
        self.assertEqual(len(events), len(self.told().splitlines()))
        self.assertTrue(found.ended and found.worth_keeping)
        self.assertEqual((found.barred, found.case), ("", None))
        self.assertEqual(
            [(f.case, f.group, f.verdict, len(f.evidence)) for f in found.findings],
            [
                ("tool_none_needed", "tools", "pass", 2),
                ("greedy_repeats", "determinism", "pass", 12),
            ],
        )
        self.assertEqual((len(found.greedy), found.greedy_set), (6, GREEDY_SET))
        self.assertGreater(found.seconds, 0)
        self.assertLessEqual(sum(f.seconds for f in found.findings), found.seconds)

    def test_without_a_plain_answer_nothing_else_is_asked(self) -> None:
        self.model.obey(plain="error")
        self.plan("tool_one_call")
        self.assertEqual(self.run_it().returncode, 0)
        self.assertEqual([event.event for event in self.events()][-1], "barred")
        self.assertEqual(len(self.model.seen), 1)
        found = ProbeFound(self.run_folder)
        found.news()
        self.assertIn("500", found.barred)
        self.assertFalse(found.worth_keeping or found.ended)

    def test_what_is_known_beforehand_reaches_the_cases(self) -> None:
        facts = ProbeFacts(context_limit=None, vision=False, vision_source="its config.json")
        plan = ProbePlan(
            base_url=self.model.url,
            model="scripted",
            cases=["vision_picture", "context_at_limit"],
            timeout_s=5,
            facts=facts,
        )
        (self.run_folder / "plan.json").write_text(plan.model_dump_json())
        self.assertEqual(self.run_it().returncode, 0)
        judged = [event for event in self.events() if event.event == "judged"]
        self.assertEqual([event.verdict for event in judged], ["untested", "untested"])
        self.assertIn("its config.json", judged[0].detail)
        self.assertEqual(len(self.model.seen), 1)


class RefusalTest(ProgramCase):
    def test_a_folder_without_a_good_plan_is_refused(self) -> None:
        good = {"base_url": self.model.url, "model": "m", "cases": ["tool_one_call"]}
        good["timeout_s"] = 5  # type: ignore[assignment]
        for plan in (
            None,
            "{broken",
            "[]",
            json.dumps({**good, "cases": []}),
            json.dumps({**good, "cases": ["everything"]}),
            json.dumps({**good, "timeout_s": 0}),
            json.dumps({**good, "more": 1}),
        ):
            with self.subTest(plan):
                if plan is not None:
                    (self.run_folder / "plan.json").write_text(plan)
                done = self.run_it()
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertTrue(done.stderr.startswith("INVALID "), done.stderr)
        self.assertEqual((self.model.seen, self.told()), ([], ""))

    def test_wrong_usage(self) -> None:
        self.assertEqual(self.run_it(str(self.run_folder), "more").returncode, 2)
        self.assertEqual(self.run_it("--help").returncode, 0)


class OrphanTest(ProgramCase):
    # Starts the program, tells its pid and ends when its input does.
    STARTER = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(sys.argv[1:], stderr=open(sys.argv[-1] + '/errors', 'w'))\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )

    def test_it_ends_when_its_parent_is_gone(self) -> None:
        self.model.obey(pause_s=60)
        self.plan("tool_one_call")
        command = [sys.executable, str(self.folder / "probe.py"), str(self.run_folder)]
        with subprocess.Popen(
            [sys.executable, "-c", self.STARTER, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as parent:
            assert parent.stdout is not None
            program = psutil.Process(int(parent.stdout.readline()))
            self.until(lambda: self.model.seen)
            self.assertTrue(program.is_running())
            parent.kill()
        self.until(lambda: not program.is_running() or program.status() == psutil.STATUS_ZOMBIE)
        self.assertIn("CANCELLED ", (self.run_folder / "errors").read_text())
        self.assertEqual([event.event for event in self.events()], ["asking"])

    def test_it_asks_nothing_for_a_parent_that_was_gone_before_it_looked(self) -> None:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        self.plan("tool_one_call", parent_pid=ended.pid)
        done = self.run_it()
        self.assertEqual(done.returncode, 1)
        self.assertTrue(done.stderr.startswith("CANCELLED "), done.stderr)
        self.assertEqual(self.model.seen, [])


class KeyTest(ProgramCase):
    """A server that asks for a key, and repeats it in every answer."""

    KEY = "plain words of no known shape 0123456789"

    def test_the_key_goes_out_and_stands_in_no_event(self) -> None:
        heard: list[str] = []

        class Echo(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                heard.append(str(self.headers["Authorization"]))
                message = {"role": "assistant", "content": f"you sent {heard[-1]}"}
                data = json.dumps({"choices": [{"message": message}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_unused: object) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), Echo) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self.addCleanup(server.shutdown)
            url = f"http://127.0.0.1:{server.server_address[1]}"
            self.plan("tool_one_call", url=url, api_key_variable="RIG_MODEL_API_KEY")
            done = self.run_it(environment={"RIG_MODEL_API_KEY": self.KEY})
            server.shutdown()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(set(heard), {f"Bearer {self.KEY}"})
        self.assertIn("you sent", self.told())
        self.assertNotIn(self.KEY, self.told() + done.stdout + done.stderr)

    def test_a_plan_that_names_no_variable_sends_no_key(self) -> None:
        self.plan("vision_picture")
        done = self.run_it(environment={"RIG_MODEL_API_KEY": self.KEY})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn(self.KEY, self.told())


class FoundTest(ProgramCase):
    """What a file of events says, whatever is in it."""

    def found(self, *lines: dict[str, Any] | str, end: str = "\n") -> ProbeFound:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (self.run_folder / "events.jsonl").write_text("\n".join(texts) + end)
        found = ProbeFound(self.run_folder)
        found.news()
        return found

    def test_no_file_and_no_folder_are_no_news(self) -> None:
        for folder in (self.run_folder, self.folder / "absent", self.folder / "probe.py"):
            self.assertEqual(ProbeFound(folder).news(), [])

    def test_a_torn_line_is_read_when_it_is_whole(self) -> None:
        begun, end = '{"event":"begun","case":"vision_picture"}', '{"event":"end"}'
        found = self.found(begun, end, end="")
        self.assertIsNotNone(found.case)
        self.assertFalse(found.ended)
        with (self.run_folder / "events.jsonl").open("a") as file:
            file.write("\n")
        self.assertEqual([event.event for event in found.news()], ["end"])
        self.assertTrue(found.ended)

    def test_what_is_no_event_is_left_out(self) -> None:
        found = self.found(
            "",
            "[]",
            "{broken",
            {"event": "weather"},
            {"event": "end", "at_s": -1},
            {"event": "judged", "case": "vision_picture", "verdict": "pass"},  # never begun
            {"event": "begun", "case": "everything"},
            {"event": "judged", "case": "everything", "verdict": "pass", "detail": "x"},
            {"event": "begun", "case": "tool_one_call"},
            {"event": "judged", "verdict": "pass", "detail": "no evidence"},
            {"event": "begun", "case": "vision_picture"},
            {"event": "answered", "exchange": EXCHANGE},
            {"event": "judged", "verdict": "pass", "detail": "seen"},
        )
        self.assertEqual(
            [(f.case, f.verdict) for f in found.findings], [("vision_picture", "pass")]
        )
        self.assertFalse(found.ended)

    def test_a_case_that_was_cut_short_keeps_what_it_had(self) -> None:
        found = self.found(
            {"event": "answered", "exchange": {**EXCHANGE, "what": "a plain question"}},
            {"event": "begun", "case": "greedy_repeats"},
        )
        self.assertFalse(found.worth_keeping)
        found = self.found(
            {"event": "begun", "case": "greedy_repeats", "at_s": 1},
            {"event": "answered", "exchange": EXCHANGE, "at_s": 2.5},
        )
        self.assertTrue(found.worth_keeping)
        for _ in range(2):
            found.cut_short("cancelled")
        (finding,) = found.findings
        self.assertEqual((finding.verdict, found.seconds), ("untested", 2.5))
        self.assertIn("cancelled in the middle", finding.detail)
        self.assertEqual(finding.evidence, [ProbeExchange.model_validate(EXCHANGE)])


class FormTest(unittest.TestCase):
    def test_every_case_that_is_planned_has_its_run(self) -> None:
        self.assertEqual({case.name for case in PROBE_CASES}, set(PROBE_RUNS))
        self.assertEqual({case.group for case in PROBE_CASES}, set(PROBE_GROUPS))
        self.assertTrue(all(case.title for case in PROBE_CASES))

    def test_a_plan_and_an_event_come_back_as_they_were(self) -> None:
        plan = ProbePlan(base_url="u", model="m", cases=["a"], timeout_s=1, parent_pid=7)
        self.assertEqual(ProbePlan.model_validate_json(plan.model_dump_json()), plan)
        exchange = ProbeExchange.model_validate(EXCHANGE)
        event = ProbeEvent(event="answered", at_s=1, case="c", exchange=exchange)
        text = event.model_dump_json(exclude_defaults=True)
        self.assertEqual(ProbeEvent.model_validate_json(text), event)
        with self.assertRaises(ValidationError):
            ProbeEvent.model_validate({"event": "end", "more": 1})


if __name__ == "__main__":
    unittest.main()
