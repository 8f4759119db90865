"""What boot.py does besides booting, as the process that it is: the watch that ends a machine, and
the acts of whoever comes over ssh."""

from __future__ import annotations

import base64
import json
import subprocess
import time
import unittest
import urllib.request
from pathlib import Path
from typing import Any

from forge.suites.fake_google import FakeGoogle
from tests.boot_sandbox import (
    ACCESS,
    IMAGE,
    META,
    METRICS,
    PATIENCE_S,
    TOKEN,
    WEIGHTS_LINE,
    Answer,
    GoogleSandbox,
    google_error,
)


class Watching(GoogleSandbox):
    """A machine that was booted, on which the watch runs with short minutes."""

    short_s = 0.1
    idle_minutes = 8
    life_s = 14_400
    leave = ""

    def make_document(self) -> dict[str, Any]:
        own = {"idle_minutes": self.idle_minutes, "life_s": self.life_s, "leave": self.leave}
        return super().make_document() | own

    def watch(self) -> subprocess.Popen[str]:
        return self.start("idle", GEMMA4_MINUTE_S=str(self.short_s))

    def metrics(self, running: str = "0.0", tokens: str = "0.0") -> None:
        page = METRICS.format(running=running, tokens=tokens)
        self.cloud.answers["GET /metrics"] = (200, page)

    def assert_goes_on(self, process: subprocess.Popen[str], looks: int = 24) -> None:
        """The watch has looked so often, for three times the idle minutes, and ended nothing."""
        before = len(self.asked("GET", "/metrics"))
        self.until(lambda: len(self.asked("GET", "/metrics")) >= before + looks, "many looks")
        self.assertIsNone(process.poll())
        self.assertEqual(self.ran("shutdown"), [])

    def ended(self, process: subprocess.Popen[str]) -> str:
        """What the watch said, having ended the machine."""
        output, _ = process.communicate(timeout=PATIENCE_S)
        self.assertEqual(process.returncode, 0, output)
        self.assertEqual(self.ran("shutdown")[-1:], [["shutdown", "-h", "now"]])
        self.assert_no_canary(output)
        return output


class TestIdle(Watching):
    def test_a_machine_that_nobody_uses_shuts_down(self) -> None:
        self.boot()
        told = self.ended(self.watch())
        self.assertIn("GEMMA4-BOOT idle begin", told)
        self.assertIn("no use for 8 minutes", told)
        self.assertEqual(self.state().ending, "no use for 8 minutes")
        self.assertIn("no use for 8 minutes", (self.root / "dev/console").read_text())

    def test_requests_that_are_being_served_keep_it(self) -> None:
        self.boot()
        self.metrics(running="2.0")
        process = self.watch()
        self.assert_goes_on(process)
        self.metrics()
        self.ended(process)

    def test_requests_between_two_looks_keep_it(self) -> None:
        self.boot()
        total = [0.0]

        def page() -> Answer:
            total[0] += 7
            return 200, METRICS.format(running="0.0", tokens=str(total[0]))

        self.cloud.answers["GET /metrics"] = page
        # Short minutes may be over before the first look, which has to have one to compare with.
        earlier = {"at": 0, "seen": {"vllm:generation_tokens_total": 0.0}}
        (self.root / "var/lib/gemma4/use.json").write_text(json.dumps(earlier))
        process = self.watch()
        self.assert_goes_on(process)
        self.metrics(tokens=str(total[0]))
        self.ended(process)

    def test_a_total_that_no_longer_grows_is_no_use(self) -> None:
        self.boot()
        self.metrics(tokens="1.5e+06")
        self.ended(self.watch())

    def test_a_page_without_the_named_metrics_ends_nothing(self) -> None:
        self.boot()
        for page in ("", "vllm:renamed_running 1.0\n", "vllm:num_requests_running NaN\n", "\0\xff"):
            self.cloud.answers["GET /metrics"] = (200, page)
            process = self.watch()
            self.assert_goes_on(process)
            process.kill()

    def test_a_server_that_answers_no_more_is_no_use(self) -> None:
        self.boot()
        self.cloud.answers["GET /metrics"] = (500, "")
        self.ended(self.watch())

    def test_a_boot_that_failed_ends_as_an_idle_machine_does(self) -> None:
        self.world(faults={"docker run": ["docker: no"]})
        self.cloud.answers["GET /metrics"] = (404, "")
        self.assertEqual(self.boot()[0], 1)
        left = json.loads(self.act("status").stdout)["idle_left_s"]
        self.assertLessEqual(left, self.idle_minutes * self.minute_s)
        self.ended(self.watch())

    def test_a_boot_under_way_has_its_hour_first(self) -> None:
        self.cloud.answers["GET /health"] = (503, "")
        self.cloud.answers["GET /metrics"] = (404, "")
        self.start()
        self.until(lambda: "weights note" in self.marks(), "the container")
        left = json.loads(self.act("status").stdout)["idle_left_s"]
        self.assertGreater(left, 60 * self.minute_s)
        self.assertLessEqual(left, (60 + self.idle_minutes) * self.minute_s)

    def test_without_any_document_the_usual_time_holds(self) -> None:
        self.give("no document")
        self.cloud.answers["GET /metrics"] = (404, "")
        self.assertEqual(self.boot()[0], 1)
        self.short_s = 0.02
        self.assertIn("no use for 30 minutes", self.ended(self.watch()))

    def test_before_any_boot_was_marked_the_watch_holds_out(self) -> None:
        self.short_s = 0.02
        (self.root / "var/lib/gemma4").mkdir(parents=True)
        (self.root / "var/lib/gemma4/first_boot").touch()
        self.assertIn("no use for 30 minutes", self.watch().communicate(timeout=PATIENCE_S)[0])

    def test_a_damaged_record_of_use_is_no_matter(self) -> None:
        self.boot()
        (self.root / "var/lib/gemma4/use.json").write_text('{"at": ')
        self.ended(self.watch())

    def test_the_service_runs_the_installed_program(self) -> None:
        self.boot()
        unit = (self.root / "etc/systemd/system/gemma4-idle.service").read_text()
        self.assertIn("Restart=always", unit)
        self.assertIn("WantedBy=multi-user.target", unit)
        (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
        python, program, word = line.removeprefix("ExecStart=").split()
        self.assertEqual((python, word), (self.python, "idle"))
        process = self.start(word, file=Path(program), GEMMA4_MINUTE_S="0.05")
        self.ended(process)

    def test_without_systemd_the_watch_runs_all_the_same(self) -> None:
        self.world(faults={"systemctl daemon-reload": ["System has not been booted with systemd"]})
        self.document["life_s"] = 1
        self.give(self.document)
        status, output = self.boot()
        self.assertIn("the watch runs without its service", output)
        self.until(lambda: self.ran("shutdown"), "the end")


class TestIdleNever(Watching):
    idle_minutes = 0

    def test_a_machine_that_may_be_idle_goes_on(self) -> None:
        self.boot()
        self.assert_goes_on(self.watch())
        self.assertNotIn("idle_left_s", json.loads(self.act("status").stdout))


class TestLife(Watching):
    life_s = 1

    def test_its_time_ends_a_machine_that_is_in_use(self) -> None:
        self.boot()
        self.metrics(running="3.0")
        self.assertIn("its 1 s are over", self.ended(self.watch()))


class TestLeaving(Watching):
    def setUp(self) -> None:
        super().setUp()
        self.path = "/compute/v1/projects/fake-proj/zones/us-east5-b/instances/vm-1"
        self.document["leave"] = self.cloud.base + self.path
        self.give(self.document)
        self.boot()

    def test_the_machine_asks_for_its_own_deletion(self) -> None:
        self.cloud.answers[f"DELETE {self.path}"] = (200, "{}")
        told = self.ended(self.watch())
        (headers,) = self.asked("DELETE", self.path)
        self.assertEqual(headers["Authorization"], f"Bearer {ACCESS}")
        self.assertIn("idle done", " ".join(self.marks()))
        self.assertLess(told.index("deletes this machine"), told.index("shuts down"))

    def test_where_that_is_refused_it_shuts_down(self) -> None:
        words = "Required 'compute.instances.delete' permission"
        self.cloud.answers[f"DELETE {self.path}"] = google_error(403, words)
        told = self.ended(self.watch())
        self.assertIn(words, told)
        self.assertIn("this machine shuts down", told)

    def test_without_credentials_it_shuts_down(self) -> None:
        del self.cloud.answers[f"GET {META}/service-accounts/default/token"]
        self.assertIn("no service account", self.ended(self.watch()))
        self.assertEqual(self.asked("DELETE", self.path), [])

    def test_a_shutdown_that_fails_is_said_and_tried_again_by_the_service(self) -> None:
        self.world(faults={"shutdown -h": ["Failed to talk to init daemon."]})
        process = self.watch()
        output, _ = process.communicate(timeout=PATIENCE_S)
        self.assertEqual(process.returncode, 1)
        self.assertIn("Failed to talk to init daemon.", output)
        self.ended(self.watch())

    def test_at_the_fake_google_the_instance_is_gone(self) -> None:
        with FakeGoogle() as google:
            body = {"name": "vm-1", "machineType": "zones/us-east5-b/machineTypes/ct6e-standard-1t"}
            request = urllib.request.Request(
                google.base + self.path.rpartition("/")[0],
                data=json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
            )
            urllib.request.urlopen(request).close()
            google.advance(60)
            self.assertEqual(google.held()["instances"], ["vm-1"])
            self.document["leave"] = google.base + self.path
            self.give(self.document)
            self.assertEqual(self.boot()[0], 0)
            self.ended(self.watch())
            google.advance(60)
            self.assertNotIn("instances", google.held())


class TestActs(GoogleSandbox):
    def said(self, word: str, **given: Any) -> str:
        done = self.act(word, **given)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assert_no_canary(done.stdout)
        return done.stdout.rstrip("\n")

    def test_the_log_has_both_streams_in_order_and_its_end(self) -> None:
        self.world(log=[["out", "one"], ["err", "two"], ["out", "three"]])
        self.boot()
        self.assertEqual(self.said("logs", lines=2), "two\nthree")
        self.assertEqual(self.said("logs"), "one\ntwo\nthree")

    def test_a_log_is_bounded_printable_and_without_secrets(self) -> None:
        lines = [["out", "x" * 990 + f"\x1b[1m é {n}"] for n in range(120)]
        self.world(log=[*lines, ["err", f"token {TOKEN} refused"]])
        self.boot()
        text = self.said("logs", lines=5000)
        self.assertLessEqual(len(text.encode()), 60_000)
        self.assertTrue(text.endswith("é 119\ntoken [redacted] refused"), text[-60:])
        self.assertNotIn("\x1b", text)

    def test_an_answer_keeps_to_the_limit_that_was_asked_for(self) -> None:
        self.world(log=[["out", f"{n} é"] for n in range(500)])
        self.boot()
        for n in range(60):
            with (self.root / "var/lib/gemma4/boot.log").open("a") as log:
                log.write(f"GEMMA4-BOOT ready note {int(time.time())} {n} {'x' * 400}\n")
        for limit in (500, 1_501, 24_000):
            for word in ("logs", "boot_log"):
                told = self.act(word, lines=5000, limit=limit).stdout
                self.assertLessEqual(len(told.encode()), limit)
                self.assertTrue(told.endswith("499 é\n" if word == "logs" else "xxx\n"), told)
        for limit in (2_000, 24_000):
            text = self.act("status", limit=limit).stdout
            self.assertLessEqual(len(text.encode()), limit)
            told = json.loads(text)
            self.assertIn(" 59 " if limit > 20_000 else "59 ", f" {told['boot'][-1]['words']}")
            self.assertEqual(told["container"]["state"], "running")
            self.assertGreater(len(told["boot"]), 1 if limit < 20_000 else 30)

    def test_the_boot_log_is_its_last_lines(self) -> None:
        self.boot()
        self.assertEqual(self.said("boot_log", lines=2), "\n".join(self.log().splitlines()[-2:]))
        self.assertEqual(self.state(self.said("boot_log")), self.state())

    def test_status_tells_container_boot_and_room(self) -> None:
        self.world(log=[["out", WEIGHTS_LINE]])
        self.boot()
        status = json.loads(self.said("status"))
        container = status["container"]
        self.assertEqual((container["state"], container["exit_code"]), ("running", 0))
        self.assertEqual((container["restarts"], container["image"]), (0, IMAGE))
        self.assertRegex(container["started_at"], r"^\d{4}-\d\d-\d\dT")
        self.assertFalse(status["booting"])
        self.assertEqual([m["phase"] for m in status["boot"]][-1], "ready")
        self.assertEqual(status["memory"], {"Total": 2048 * 1024, "Available": 1024 * 1024})
        self.assertGreater(status["disk"]["total"], status["disk"]["free"])
        self.assertLessEqual(status["life_left_s"], 14_400)
        self.assertLessEqual(status["idle_left_s"], 30 * self.minute_s)

    def test_status_of_a_stopped_and_of_no_container(self) -> None:
        self.boot()
        self.change_container(status="exited", code=137, oom=True)
        container = json.loads(self.said("status"))["container"]
        self.assertEqual((container["state"], container["exit_code"]), ("exited", 137))
        self.assertTrue(container["out_of_memory"])
        self.world(containers={})
        self.assertIsNone(json.loads(self.said("status"))["container"])

    def test_status_without_docker_tells_the_problem(self) -> None:
        self.boot()
        (self.bin / "docker").unlink()
        status = json.loads(self.said("status"))
        self.assertIsNone(status["container"])
        self.assertEqual(status["problem"], "docker is not on this machine")

    def test_status_during_a_boot_and_after_a_failure(self) -> None:
        self.cloud.answers["GET /health"] = (503, "")
        process = self.start()
        self.until(lambda: "weights note" in self.marks(), "the container")
        self.assertTrue(json.loads(self.said("status"))["booting"])
        self.change_container("no", status="exited", code=1)
        process.wait(PATIENCE_S)
        self.assertFalse(json.loads(self.said("status"))["booting"])

    def test_before_any_document_status_answers_and_acts_say_why_not(self) -> None:
        self.assertIsNone(json.loads(self.act("status").stdout)["container"])
        self.assertEqual(self.act("boot_log").stdout.strip(), "")
        for word in ("logs", "start", "stop", "restart", "rm"):
            done = self.act(word)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn("no boot document", done.stderr)
        self.assertEqual(self.ran("docker"), [])

    def test_stop_start_restart_and_rm_say_what_they_did(self) -> None:
        self.boot()
        self.assertEqual(self.said("start"), "vllm runs already")
        self.assertEqual(self.said("stop"), "vllm was stopped")
        self.assertEqual(self.said("stop"), "vllm does not run")
        self.assertEqual(self.said("start"), "vllm was started")
        self.until(lambda: self.marks().count("ready done") == 2, "the second ready")
        self.assertEqual(self.said("restart"), "vllm was restarted")
        self.until(lambda: self.marks().count("ready done") == 3, "the third ready")
        self.assertEqual(self.said("rm"), "vllm was removed")
        self.assertEqual(self.said("rm"), "vllm is not there")
        self.assertEqual(self.said("stop"), "vllm does not run")
        self.assertEqual(len(self.ran("docker", "run")), 1)

    def test_start_makes_a_container_that_was_removed_with_a_fresh_token(self) -> None:
        for n, word in enumerate(("start", "restart"), 2):
            with self.subTest(word):
                self.boot()
                self.said("rm")
                self.assertEqual(self.said(word), "vllm is being made: see the boot log")
                self.until(lambda: self.world()["containers"], "the container")
                env = self.world()["containers"]["vllm"]["env"]
                self.assertEqual(env, [f"HF_TOKEN={TOKEN}"])
                ready = 2 * n - 2
                self.until(lambda r=ready: self.marks().count("ready done") == r, "ready")

    def test_start_counts_as_use(self) -> None:
        self.boot()
        self.said("stop")
        use = self.root / "var/lib/gemma4/use.json"
        self.assertFalse(use.exists())
        self.said("start")
        self.assertGreater(json.loads(use.read_text())["at"], time.time() - PATIENCE_S)

    def test_what_docker_refuses_is_told_with_status_one(self) -> None:
        self.boot()
        self.world(faults={"docker stop": ["Error response from daemon: cannot stop container"]})
        done = self.act("stop")
        self.assertEqual(done.returncode, 1)
        self.assertIn("cannot stop container", done.stderr)

    def test_wrong_usage_does_nothing(self) -> None:
        self.boot()
        before = len(self.ran())
        empty = base64.urlsafe_b64encode(b"{}").decode()
        for argv in (
            ("exec", empty),
            ("logs",),
            ("logs", empty, empty),
            ("logs", "%%%"),
            ("logs", base64.urlsafe_b64encode(b"[]x").decode()),
            ("logs", base64.urlsafe_b64encode(b"7").decode()),
            ("boot", empty),
            ("--help", empty),
            ("idle", empty),
        ):
            with self.subTest(argv):
                done = self.send(*argv)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertTrue(done.stderr.startswith("usage: "), done.stderr)
        for key, most in (("lines", 5001), ("limit", 60_001)):
            for number in (0, -1, most, True, 1.5, "5", None, [1], "$(touch x)"):
                with self.subTest(key, number=number):
                    self.assertEqual(self.act("logs", **{key: number}).returncode, 2)
        self.assertEqual(len(self.ran()), before)


if __name__ == "__main__":
    unittest.main()
