"""Tests of the demo: the whole of it, as a process, over a copy of the rig with a fake engine."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
import unittest

from forge.suites.rig_case import rig_processes
from tests.fresh_rig import PATIENCE_S, ROOT, FreshRigCase

STEPS = (
    "plan_deployment get_system_status serve_model wait_for_model_ready verify_model_health "
    "query_gemma4 query_gemma4_with_stats run_benchmark get_job analyze_logs serve_model "
    "stop_model get_system_status"
).split()


class DemoTest(FreshRigCase):
    """`python3 -m forge.demo RIG`."""

    def setUp(self) -> None:
        super().setUp()
        # Where the demo keeps its state, apart from the user's.
        self.users_state, self.state = self.state, self.place / "cache/gemma4-rigs/demo-state"
        shutil.rmtree(self.state, ignore_errors=True)
        path = f"{self.environment['PYTHONPATH']}:{ROOT}"
        self.environment["PYTHONPATH"] = path
        self.argv = [sys.executable, "-m", "forge.demo", str(self.rig)]

    def play(self) -> subprocess.CompletedProcess[str]:
        done = self.run_in_rig(*self.argv)
        self.assertEqual(rig_processes(self.state), [], "something was left running")
        return done

    def played(self) -> str:
        """The story of a demo that must succeed."""
        done = self.play()
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return done.stdout

    def start_until(self, sign: str) -> subprocess.Popen[str]:
        """A demo that runs and has just told `sign`."""
        demo = subprocess.Popen(
            self.argv, env=self.environment, stdout=subprocess.PIPE, text=True, cwd=self.rig
        )
        self.addCleanup(demo.wait)
        self.addCleanup(demo.kill)
        assert demo.stdout is not None
        self.addCleanup(demo.stdout.close)
        for line in demo.stdout:
            if sign in line:
                return demo
        self.fail(f"the demo ended without telling {sign!r}")

    def wait_for_model_server(self) -> None:
        """Return once it exists; the load phase begins a moment before."""
        deadline = time.monotonic() + PATIENCE_S
        while not rig_processes(self.state, "server"):
            self.assertLess(time.monotonic(), deadline, "no model server was started")
            time.sleep(0.05)

    def test_every_step_is_told_in_its_order(self) -> None:
        # What the user has set for his own rig has no say in the demo.
        self.environment.update(MODEL_NAME="/no/such", DTYPE="float32", RIG_READ_ONLY="1")
        self.engine.script(load_s=3)
        story = self.played()
        calls = [line.split()[1].partition("(")[0] for line in story.splitlines() if "-> " in line]
        waits = ("wait_for_model_ready", "get_job")  # as often as it takes
        self.assertEqual(
            [call for call in calls if call not in waits],
            [step for step in STEPS if step not in waits],
        )
        self.assertIn("'Paris.'", story)
        self.assertIn("'Good day.'", story)
        self.assertIn("tokens/s", story)
        self.assertIn("EXISTS", story)
        self.assertNotIn("\x1b", story)
        # The time left comes from earlier starts: nobody knows it before the first one.
        time_left = r"about [1-9]\d* s left"
        self.assertNotRegex(story, time_left)
        self.assertEqual(list(self.users_state.iterdir()), [])
        self.assertRegex(self.played(), time_left)

    def test_a_step_that_does_not_do_what_it_should_fails_the_demo(self) -> None:
        self.engine.script(answer="Berlin.")
        done = self.play()
        self.assertEqual(done.returncode, 1)
        self.assertIn("FAILED: step", done.stdout)
        self.assertIn("verify_model_health", done.stdout.partition("FAILED")[2])
        self.engine.script(crash="out of luck")
        done = self.play()
        self.assertEqual(done.returncode, 1)
        self.assertIn("out of luck", done.stdout)

    def test_a_server_that_does_not_come_up_fails_the_demo(self) -> None:
        server = self.rig / "server.py"
        text = server.read_text()
        self.addCleanup(server.write_text, text)
        server.write_text(text + "\nraise RuntimeError('no server today')\n")
        done = self.play()
        self.assertEqual(done.returncode, 1)
        self.assertIn("FAILED: the server was lost", done.stdout)
        self.assertIn("no server today", done.stdout)

    def test_an_interrupt_stops_what_was_started(self) -> None:
        self.engine.script(load_s=60)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(signal=number.name):
                demo = self.start_until("load:")
                self.wait_for_model_server()
                demo.send_signal(number)
                rest = demo.communicate(timeout=PATIENCE_S)[0]
                self.assertEqual(demo.returncode, 128 + number)
                self.assertIn("no model server of this rig is left", rest)
                self.assertEqual(rig_processes(self.state), [])

    def test_what_a_killed_demo_left_is_cleared_up_by_the_next(self) -> None:
        demo = self.start_until("verify_model_health")
        demo.kill()
        demo.wait()
        self.assertNotEqual(rig_processes(self.state, "server"), [])
        self.assertIn("An earlier demo was cut off.", self.played())

    def test_two_do_not_run_at_once(self) -> None:
        self.engine.script(load_s=60)
        demo = self.start_until("load:")
        self.wait_for_model_server()
        done = self.run_in_rig(*self.argv)
        self.assertEqual(done.returncode, 1)
        self.assertIn("another demo is running", done.stdout)
        self.assertIsNone(demo.poll())
        self.assertNotEqual(rig_processes(self.state, "server"), [])
        demo.terminate()
        demo.communicate(timeout=PATIENCE_S)

    def test_colours_on_a_terminal_only(self) -> None:
        self.environment["HOME"] = str(self.place)
        ours, theirs = pty.openpty()
        demo = subprocess.Popen(self.argv, env=self.environment, stdout=theirs, cwd=self.rig)
        os.close(theirs)
        begun, story = time.monotonic(), b""
        try:
            while time.monotonic() - begun < PATIENCE_S:
                story += os.read(ours, 4096)
        except OSError:
            pass  # the other end was closed
        finally:
            os.close(ours)
        self.assertEqual(demo.wait(PATIENCE_S), 0)
        self.assertIn(b"\x1b[1m1. ", story)


if __name__ == "__main__":
    unittest.main()
