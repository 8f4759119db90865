"""boot.py as the process that it is on a rented machine of Google's: the whole boot, with a
metadata server, a secret and a bucket on loopback, and the text itself."""

from __future__ import annotations

import ast
import base64
import json
import stat
import sys
import time
import unittest
from typing import Any

from forge.bundle import bundle
from forge.suites.fake_google import FakeGoogle
from tests.boot_sandbox import (
    ACCESS,
    COMPILE_LINE,
    IMAGE,
    META,
    PATIENCE_S,
    PLAIN_TOKEN,
    ROOT,
    SECRET,
    TOKEN,
    WEIGHTS_LINE,
    GoogleSandbox,
    google_error,
    program_text,
    secret_answer,
)


class TestColdBoot(GoogleSandbox):
    def test_everything_succeeds_in_order(self) -> None:
        self.world(log=[["out", WEIGHTS_LINE], ["err", COMPILE_LINE]])
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        kept = [mark for mark in self.marks() if not mark.endswith("note")]
        self.assertEqual(
            kept,
            ["docker begin", "docker done", "image begin", "image done", "token begin"]
            + ["token done", "weights begin", "weights done", "compile begin", "compile done"]
            + ["ready done"],
        )
        self.assertEqual(self.ran("docker", "run"), [self.document["container"]])
        self.assert_watched()
        self.assert_no_canary(output)

    def test_log_console_and_output_say_the_same(self) -> None:
        _, output = self.boot()
        console = (self.root / "dev" / "console").read_text()
        self.assertEqual(output, console)
        self.assertEqual(output, self.log())
        self.assertTrue(self.state(output).ready)

    def test_docker_alone_reads_the_token_and_its_file_goes(self) -> None:
        self.boot()
        world = self.world()
        self.assertEqual(world["containers"]["vllm"]["env"], [f"HF_TOKEN={TOKEN}"])
        self.assertEqual(world["token_mode"], "0o600")
        self.assertEqual(list((self.root / "run/gemma4").iterdir()), [])
        self.assertEqual(stat.S_IMODE((self.root / "run/gemma4").stat().st_mode), 0o700)

    def test_a_file_that_lies_in_the_tokens_place_is_not_written_into(self) -> None:
        (self.root / "run/gemma4").mkdir(parents=True)
        other = self.folder / "other"
        other.write_text("as it was")
        (self.root / "run/gemma4/token.env").symlink_to(other)
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertEqual(other.read_text(), "as it was")

    def test_a_token_of_any_shape_is_kept_out_of_every_word(self) -> None:
        self.cloud.answers[f"GET {SECRET}"] = secret_answer(PLAIN_TOKEN + "\n")
        self.cloud.answers["GET /health"] = (503, "")
        self.world(log=[["err", f"login with {PLAIN_TOKEN} refused"]])
        process = self.start()
        self.until(lambda: "vllm" in self.world()["containers"], "the container")
        self.change_container("the end", status="exited", code=1)
        output, _ = process.communicate(timeout=PATIENCE_S)
        self.assertIn("login with [redacted] refused", self.failure())
        self.assert_no_canary(output)

    def test_without_a_secret_no_token_is_asked_for(self) -> None:
        self.document["secret"] = ""
        self.give(self.document)
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertIn("no secret is named", output)
        self.assertEqual(self.world()["containers"]["vllm"]["env"], [])
        self.assertEqual(self.asked("GET", f"{META}/service-accounts"), [])

    def test_an_image_that_is_there_is_not_pulled(self) -> None:
        self.world(images=[IMAGE])
        self.boot()
        self.assertEqual(self.ran("docker", "pull"), [])
        self.assertIn("it is here already", self.log())

    def test_health_without_a_line_of_the_log_is_ready_all_the_same(self) -> None:
        status, _ = self.boot()
        self.assertEqual(status, 0)
        self.assertNotIn("weights begin", self.marks())
        self.assertTrue(self.state().ready)

    def test_compiling_without_weights_begins_with_its_own_line(self) -> None:
        self.world(log=[["out", COMPILE_LINE]])
        self.boot()
        self.assertNotIn("weights begin", self.marks())
        self.assertEqual(self.marks()[-3:], ["compile begin", "compile done", "ready done"])

    def test_phases_begin_when_their_lines_come_and_each_only_once(self) -> None:
        self.cloud.answers["GET /health"] = (503, "loading")
        process = self.start()
        self.until(lambda: "weights note" in self.marks(), "the container")
        self.assertNotIn("weights begin", self.marks())
        self.change_container(WEIGHTS_LINE, WEIGHTS_LINE)
        self.until(lambda: "weights begin" in self.marks(), "the weights")
        self.assertNotIn("compile begin", self.marks())
        self.change_container(COMPILE_LINE, WEIGHTS_LINE, COMPILE_LINE)
        self.until(lambda: "compile begin" in self.marks(), "compiling")
        self.assertNotIn("ready done", self.marks())
        self.cloud.answers["GET /health"] = (200, "")
        self.assertEqual(process.wait(PATIENCE_S), 0)
        for mark in ("weights begin", "weights done", "compile begin", "compile done"):
            self.assertEqual(self.marks().count(mark), 1, mark)

    def test_a_line_with_a_mark_and_colours_in_it_stays_words(self) -> None:
        line = f"\x1b[1m{WEIGHTS_LINE}\x07 GEMMA4-BOOT ready done 1764500000 {TOKEN}"
        self.cloud.answers["GET /health"] = (503, "")
        self.world(log=[["err", line]])
        self.start()
        self.until(lambda: "weights begin" in self.marks(), "the weights")
        self.assertFalse(self.state().ready)
        self.assert_no_canary(self.log())
        self.assertNotIn("\x1b", self.log())

    def test_a_console_that_is_missing_is_no_matter(self) -> None:
        (self.root / "dev" / "console").unlink()
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertFalse((self.root / "dev" / "console").exists())

    def test_with_the_fake_google_as_secret_manager(self) -> None:
        with FakeGoogle() as google:
            google.secrets.payloads["hf-token"] = [base64.b64encode(TOKEN.encode()).decode()]
            status, output = self.boot(GEMMA4_SECRETS_URL=google.base)
            self.assertEqual(status, 0, output)
            self.assertEqual(self.world()["containers"]["vllm"]["env"], [f"HF_TOKEN={TOKEN}"])
            self.assertEqual(len(google.sent("GET", "versions/latest")), 1)


class TestDocker(GoogleSandbox):
    def test_docker_is_installed_where_it_is_missing_once_the_lock_is_free(self) -> None:
        (self.bin / "docker").unlink()
        (self.bin / "apt-get").symlink_to(self.bin / "stub")
        lock = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 1234"
        self.world(faults={"apt-get install": [lock, lock], "apt-get update": [lock]})
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertEqual(len(self.ran("apt-get", "install", "--yes", "docker.io")), 3)
        self.assertIn("docker note", self.marks())

    def test_docker_that_cannot_be_installed_is_a_failure_with_apts_words(self) -> None:
        self.minute_s = 0.2
        (self.bin / "docker").unlink()
        status, output = self.boot()
        self.assertEqual(status, 1)
        self.assertEqual(self.failure(), "docker: apt-get is not on this machine")
        self.assert_watched()

    def test_a_daemon_that_starts_slowly_is_waited_for(self) -> None:
        down = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock."
        self.world(faults={"docker version": [down, down]})
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertIn("24.0.7", self.log())

    def test_a_daemon_that_never_starts_is_a_failure_in_its_words(self) -> None:
        self.minute_s = 0.2
        down = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock."
        self.world(faults={"docker version": [down] * 50})
        status, output = self.boot()
        self.assertEqual(status, 1)
        self.assertIn(down, self.failure())
        self.assertTrue(self.failure().startswith("docker: "), self.failure())


class TestImage(GoogleSandbox):
    def test_the_console_tells_how_far_a_pull_is(self) -> None:
        self.world(pull_waits=True)
        process = self.start()
        self.until(lambda: "1 of 2 layers" in self.log(), "a note of the pull")
        self.world(pull_waits=False)
        output, _ = process.communicate(timeout=PATIENCE_S)
        self.assertEqual(process.returncode, 0, output)
        self.assertIn("image done", self.marks())

    def test_a_fault_of_the_network_is_tried_again(self) -> None:
        fault = "error pulling image configuration: net/http: TLS handshake timeout"
        self.world(faults={"docker pull": [fault, fault]})
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertEqual(self.ran("docker", "pull"), [["docker", "pull", IMAGE]] * 3)

    def test_the_third_fault_is_the_last_and_dockers_line_is_told(self) -> None:
        fault = "error pulling image configuration: read: connection reset by peer"
        self.world(faults={"docker pull": [fault] * 9})
        status, output = self.boot()
        self.assertEqual(status, 1)
        self.assertEqual(len(self.ran("docker", "pull")), 3)
        self.assertEqual(self.failure(), f"image: docker pull: {fault}")
        self.assertEqual(self.ran("docker", "run"), [])
        self.assert_watched()

    def test_what_no_second_try_would_mend_is_not_tried_again(self) -> None:
        for fault in (
            "Error response from daemon: manifest for vllm/x not found: manifest unknown",
            "Error response from daemon: pull access denied for vllm/x, repository does not exist",
            "write /var/lib/docker/tmp/GetImageBlob1: no space left on device",
        ):
            with self.subTest(fault):
                self.forget()
                before = len(self.ran("docker", "pull"))
                self.world(faults={"docker pull": [fault] * 9})
                self.assertEqual(self.boot()[0], 1)
                self.assertEqual(len(self.ran("docker", "pull")), before + 1)
                self.assertIn(fault, self.failure())


class TestToken(GoogleSandbox):
    def refused(self, answer: tuple[int, str]) -> str:
        """The failure, where Secret Manager answers so."""
        self.forget()
        self.cloud.answers[f"GET {SECRET}"] = answer
        status, output = self.boot()
        self.assertEqual(status, 1, output)
        self.assertEqual(self.ran("docker", "run"), [])
        self.assertEqual(self.marks()[-1], "token failed")
        self.assert_watched()
        self.assert_no_canary(output)
        return self.failure()

    def test_the_request_speaks_for_the_machine_and_only_there(self) -> None:
        self.boot()
        (headers,) = self.asked("GET", SECRET)
        self.assertEqual(headers["Authorization"], f"Bearer {ACCESS}")
        for _, path, others in self.cloud.requests:
            if path != SECRET:
                self.assertNotIn("Authorization", others)

    def test_a_missing_permission_is_told_with_its_remedy(self) -> None:
        words = (
            "Permission 'secretmanager.versions.access' denied on resource (or it may not exist)."
        )
        told = self.refused(google_error(403, words))
        self.assertIn(words, told)
        self.assertIn("roles/secretmanager.secretAccessor", told)
        self.assertEqual(len(self.asked("GET", SECRET)), 1)

    def test_a_missing_secret_is_told_with_its_remedy(self) -> None:
        told = self.refused(google_error(404, "Secret [projects/1/secrets/hf-token] not found."))
        self.assertIn("hf-token] not found", told)
        self.assertIn("save_hf_token", told)

    def test_a_machine_without_an_account_is_told(self) -> None:
        del self.cloud.answers[f"GET {META}/service-accounts/default/token"]
        self.assertIn("no service account", self.refused(secret_answer(TOKEN)))

    def test_a_server_in_trouble_is_asked_again(self) -> None:
        self.cloud.answers[f"GET {SECRET}"] = google_error(503, "The service is unavailable.")
        process = self.start()
        self.until(lambda: len(self.asked("GET", SECRET)) > 1, "a second request")
        self.cloud.answers[f"GET {SECRET}"] = secret_answer(TOKEN)
        self.assertEqual(process.wait(PATIENCE_S), 0)

    def test_a_server_that_stays_in_trouble_is_told(self) -> None:
        told = self.refused(google_error(503, "The service is unavailable."))
        self.assertIn("HTTP 503: The service is unavailable.", told)
        self.assertEqual(len(self.asked("GET", SECRET)), 6)

    def test_an_answer_that_holds_no_token_is_told_and_not_shown(self) -> None:
        answers = {
            "not base64": (200, json.dumps({"payload": {"data": "%%%"}})),
            "no payload": (200, "{}"),
            "not JSON": (200, f"<html>{TOKEN}</html>"),
            "a list": (200, "[]"),
            "empty": secret_answer(""),
            "two lines": secret_answer(f"{TOKEN}\nLD_PRELOAD=/x"),
            "not ASCII": secret_answer("hf_é"),
        }
        for name, answer in answers.items():
            with self.subTest(name):
                self.assertIn("does not hold one plain word", self.refused(answer))

    def test_credentials_do_not_follow_a_redirection(self) -> None:
        told = self.refused((302, f"{self.cloud.base}/elsewhere"))
        self.assertIn("HTTP 302", told)
        self.assertEqual(self.asked("GET", "/elsewhere"), [])


class TestContainer(GoogleSandbox):
    def test_docker_run_that_fails_is_told_in_dockers_words(self) -> None:
        words = "docker: Error response from daemon: error gathering device information: /dev/vfio"
        self.world(faults={"docker run": [words]})
        status, output = self.boot()
        self.assertEqual(status, 1)
        self.assertEqual(self.failure(), f"weights: docker run: {words}")
        self.assertEqual(list((self.root / "run/gemma4").iterdir()), [])
        self.assert_watched()

    def failed_after(self, *log: str, **changes: Any) -> str:
        """The failure, where the started container writes these lines and then becomes this."""
        self.cloud.answers["GET /health"] = (503, "")
        process = self.start()
        self.until(lambda: self.ran("docker", "logs"), "a look into the log")
        self.change_container(*log)
        self.change_container(**changes)
        self.assertEqual(process.wait(PATIENCE_S), 1)
        self.assert_watched()
        return self.failure()

    def test_a_container_that_exits_is_told_with_its_last_lines(self) -> None:
        told = self.failed_after(
            "one", "two", "three", "ValueError: no such model", status="exited", code=1
        )
        self.assertEqual(
            told,
            "weights: the container exited (status 1): two | three | ValueError: no such model",
        )

    def test_one_that_was_killed_for_memory_is_told_so(self) -> None:
        told = self.failed_after("loading", status="exited", code=137, oom=True)
        self.assertIn("(status 137, OOMKilled)", told)

    def test_one_that_docker_starts_again_has_failed_with_the_words_of_its_end(self) -> None:
        told = self.failed_after("RuntimeError: libtpu", restarts=1, at=time.time() + 3600)
        self.assertIn("(docker starts it again): RuntimeError: libtpu", told)

    def test_one_killed_for_memory_and_started_again_is_told_so(self) -> None:
        """By then its state speaks of the new run, which nobody has killed."""
        now = time.time()
        events = [[now - 3600, "start"], [now + 60, "oom"], [now + 60, "die"]]
        told = self.failed_after("loading", restarts=1, at=now + 3600, oom=False, events=events)
        self.assertIn("(docker starts it again, OOMKilled): loading", told)

    def test_a_kill_for_memory_before_this_boot_is_not_told(self) -> None:
        now = time.time()
        events = [[now - 3600, "oom"], [now + 60, "die"], [now + 7200, "oom"]]
        told = self.failed_after("loading", restarts=1, at=now + 3600, events=events)
        self.assertIn("(docker starts it again): loading", told)

    def test_one_that_dies_while_it_compiles_fails_in_that_phase(self) -> None:
        self.cloud.answers["GET /health"] = (503, "")
        self.world(log=[["out", WEIGHTS_LINE], ["out", COMPILE_LINE]])
        process = self.start()
        self.until(lambda: "compile begin" in self.marks(), "compiling")
        self.change_container("RESOURCE_EXHAUSTED", status="exited", code=1)
        self.assertEqual(process.wait(PATIENCE_S), 1)
        self.assertTrue(self.failure().startswith("compile: the container exited"), self.failure())

    def test_docker_that_hangs_is_given_up_and_told(self) -> None:
        self.minute_s = 0.02
        self.world(hangs="inspect")
        status, _ = self.boot()
        self.assertEqual(status, 1)
        self.assertEqual(self.failure(), "docker: docker inspect took more than 2 minutes")
        self.assert_watched()

    def test_one_that_was_removed_is_told(self) -> None:
        self.cloud.answers["GET /health"] = (503, "")
        process = self.start()
        self.until(lambda: "weights note" in self.marks(), "the container")
        self.world(containers={})
        self.assertEqual(process.wait(PATIENCE_S), 1)
        self.assertIn(
            "No such container" if "docker logs" in self.failure() else "was removed",
            self.failure(),
        )

    def test_a_restart_by_hand_during_the_boot_is_followed(self) -> None:
        self.cloud.answers["GET /health"] = (503, "")
        process = self.start()
        self.until(lambda: "weights note" in self.marks(), "the container")
        done = self.act("restart")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.cloud.answers["GET /health"] = (200, "")
        self.assertEqual(process.wait(PATIENCE_S), 0)

    def test_a_server_that_is_never_ready_fails_after_its_hour(self) -> None:
        self.minute_s = 0.02
        self.cloud.answers["GET /health"] = (503, "")
        status, _ = self.boot()
        self.assertEqual(status, 1)
        self.assertIn("not ready after 60 minutes", self.failure())

    def test_an_old_container_of_that_name_gives_way(self) -> None:
        old = {"argv": [], "env": [], "restarts": 3, "log": [], "status": "exited", "code": 1}
        self.world(containers={"vllm": {**old, "oom": False, "at": time.time()}})
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertEqual(self.ran("docker", "rm"), [["docker", "rm", "--force", "vllm"]])
        self.assertEqual(self.world()["containers"]["vllm"]["argv"][-1], "google/gemma-4-E2B-it")


class TestReboot(GoogleSandbox):
    def setUp(self) -> None:
        super().setUp()
        self.world(log=[["out", WEIGHTS_LINE], ["out", COMPILE_LINE]])
        self.assertEqual(self.boot()[0], 0)

    def test_the_container_is_only_followed(self) -> None:
        began = int(time.time())
        self.until(lambda: int(time.time()) > began, "the next second")  # one boot a second
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertEqual(len(self.ran("docker", "run")), 1)
        self.assertEqual(len(self.ran("docker", "pull")), 1)
        self.assertEqual(len(self.asked("GET", SECRET)), 1)
        state = self.state()
        self.assertTrue(state.ready)
        self.assertEqual([p.state for p in state.phases[1:3]], ["skipped", "skipped"])
        self.assertEqual(self.marks().count("docker begin"), 2)

    def test_one_that_does_not_run_is_started(self) -> None:
        self.change_container(status="exited", code=0)
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertEqual(self.ran("docker", "start"), [["docker", "start", "vllm"]])

    def test_another_document_means_another_container(self) -> None:
        self.document["container"][-1] = "google/gemma-4-E4B-it"
        self.give(self.document)
        self.assertEqual(self.boot()[0], 0)
        self.assertEqual(self.ran("docker", "run")[-1][-1], "google/gemma-4-E4B-it")
        self.assertEqual(len(self.world()["containers"]), 1)

    def test_lines_of_the_life_before_are_not_taken_for_this_ones(self) -> None:
        self.cloud.answers["GET /health"] = (503, "")
        self.world(log=[])
        self.change_container(status="exited", code=0)
        self.start()
        self.until(lambda: self.marks().count("weights note") == 2, "the second boot")
        before = len(self.ran("docker", "logs"))
        self.until(lambda: len(self.ran("docker", "logs")) > before + 2, "a look into the log")
        self.assertEqual(self.marks().count("weights begin"), 1)

    def test_the_first_boot_stays_the_first(self) -> None:
        first = (self.root / "var/lib/gemma4/first_boot").stat().st_mtime
        self.boot()
        self.assertEqual((self.root / "var/lib/gemma4/first_boot").stat().st_mtime, first)

    def test_two_boots_at_a_time_are_one(self) -> None:
        self.cloud.answers["GET /health"] = (503, "")
        first = self.start()
        self.until(lambda: self.marks().count("docker begin") == 2, "the boot")
        status, output = self.boot()
        self.assertEqual((status, output), (0, "a boot is under way already\n"))
        self.cloud.answers["GET /health"] = (200, "")
        self.assertEqual(first.wait(PATIENCE_S), 0)


class TestDocument(GoogleSandbox):
    def refused(self, document: Any) -> str:
        """The failure, where the metadata server has this as the document."""
        self.forget()
        self.give(document)
        status, output = self.boot()
        self.assertEqual(status, 1, output)
        self.assertEqual(self.ran("docker"), [])
        self.assert_watched()
        return self.failure()

    def test_each_field_that_is_missing_is_named(self) -> None:
        for key in self.document:
            with self.subTest(key):
                rest = {k: v for k, v in self.document.items() if k != key}
                self.assertIn(f"KeyError: '{key}'", self.refused(rest))

    def test_each_field_that_is_wrong_is_named(self) -> None:
        run = self.document["container"]
        wrong: dict[str, list[Any]] = {
            "v": [2, "1", None],
            "rig": ["", "../x", "a b", "x" * 64],
            "project": ["", "p/../../q", "Fake"],
            "image": ["", "--privileged", "a b"],
            "container": [
                ["sh", "-c", *run],
                ["docker", "exec", *run[2:]],
                ["docker", "run", "--rm", *run[2:]],
                [*run[:-1], 7],
                [*run[:-1], "a\0b"],
            ],
            "health": ["http://192.0.2.1:8000/health", "file:///etc/shadow", "http://127.0.0.1/"],
            "metrics": ["http://127.0.0.1:80@evil.test/", "https://127.0.0.1:1/m", "x"],
            "secret": ["a/b", "hf-token\n", "é"],
            "token_file": ["/etc/shadow", "/run/gemma4/../../etc/x.env", "run/gemma4/t.env"],
            "leave": [
                "http://metadata.google.internal/x",
                "https://compute.googleapis.com.evil.test/x",
                "https://evil.test/compute.googleapis.com/",
                "https://x@compute.googleapis.com/v1",
                "https://storage.googleapis.com/x",
            ],
            "idle_minutes": [-1, 1.5, True, "30", 10**7],
            "life_s": [0, -5, "14400"],
            "used": [[1], 5],
            "cache": [{"folder": "/var/lib/gemma4/../x", "bucket": ""}],
        }
        for key, values in wrong.items():
            for value in values:
                with self.subTest(key, value=value):
                    told = self.refused({**self.document, key: value})
                    self.assertIn("docker: the boot document is not valid", told)
                    if key not in ("used", "cache", "v"):
                        self.assertTrue(key in told or "TypeError" in told, told)

    def test_more_that_is_hostile(self) -> None:
        run = self.document["container"]
        bad_name = [*run[:4], "--privileged", *run[5:]]
        for document in (
            "not JSON",
            "[]",
            "7",
            '"docker run"',
            "",
            {**self.document, "image": "another/image:tag"},
            {**self.document, "container": bad_name},
            {**self.document, "container": [w for w in run if w != "--name"]},
            {**self.document, "cache": {"folder": "/var/lib/gemma4/c", "bucket": "b; rm"}},
            {**self.document, "cache": {"folder": "/var/lib/gemma4/c"}},
            {**self.document, "marks": {"weights": ["("], "compile": []}},
            {**self.document, "marks": {"weights": []}},
        ):
            with self.subTest(str(document)[:60]):
                self.assertIn("the boot document is not valid", self.refused(document))

    def test_a_machine_without_a_document_says_so(self) -> None:
        del self.cloud.answers[f"GET {META}/attributes/gemma4-boot"]
        status, _ = self.boot()
        self.assertEqual(status, 1)
        self.assertIn("docker: metadata attributes/gemma4-boot: HTTP 404", self.failure())
        self.assert_watched()

    def test_a_metadata_server_that_is_not_up_yet_is_waited_for(self) -> None:
        good = self.cloud.answers[f"GET {META}/attributes/gemma4-boot"]
        self.cloud.answers[f"GET {META}/attributes/gemma4-boot"] = (503, "not yet")
        process = self.start()
        self.until(lambda: len(self.asked("GET", f"{META}/attributes")) > 1, "a second question")
        self.cloud.answers[f"GET {META}/attributes/gemma4-boot"] = good
        self.assertEqual(process.wait(PATIENCE_S), 0)

    def test_a_metadata_server_that_never_answers_is_a_failure(self) -> None:
        self.minute_s = 0.3
        status, _ = self.boot(GCE_METADATA_HOST="127.0.0.1:1")
        self.assertEqual(status, 1)
        self.assertIn("no answer from 127.0.0.1:1", self.failure())
        self.assert_watched()


class TestCache(GoogleSandbox):
    def setUp(self) -> None:
        super().setUp()
        self.document["cache"]["bucket"] = "fake-bucket"
        self.give(self.document)
        self.near = str(self.root / "var/lib/gemma4/cache")
        self.far = "gs://fake-bucket/tpu-vllm-v6e1-2b"

    def test_it_is_restored_before_the_container_and_saved_when_ready(self) -> None:
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        argvs = [a for a in self.ran() if a[0] == "gcloud" or a[:2] == ["docker", "run"]]
        rsync = ["gcloud", "storage", "rsync", "--recursive"]
        self.assertEqual(argvs[0], [*rsync, self.far, self.near])
        self.assertEqual(argvs[1][:2], ["docker", "run"])
        self.assertEqual(argvs[2:], [[*rsync, self.near, self.far]])
        self.assertIn(f"cache restored: {self.far}", self.log())
        self.assertEqual(self.marks()[-2:], ["ready done", "ready note"])

    def test_a_bucket_that_cannot_be_had_costs_no_boot(self) -> None:
        self.world(faults={"gcloud storage": ["ERROR: 403 storage.objects.list denied"] * 2})
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertEqual(output.count("cache not "), 2)
        self.assertIn("storage.objects.list denied", output)
        self.assertTrue(self.state().ready)

    def test_a_machine_without_gcloud_says_so(self) -> None:
        (self.bin / "gcloud").unlink()
        status, output = self.boot()
        self.assertEqual(status, 0, output)
        self.assertIn("gcloud is not on this machine", output)

    def test_without_a_bucket_nothing_is_copied(self) -> None:
        self.document["cache"]["bucket"] = ""
        self.give(self.document)
        self.boot()
        self.assertEqual(self.ran("gcloud"), [])

    def test_nothing_is_saved_by_a_boot_that_failed(self) -> None:
        self.world(faults={"docker run": ["docker: no"]})
        self.assertEqual(self.boot()[0], 1)
        self.assertEqual(len(self.ran("gcloud")), 1)


class TestColdBootOnThisPython(TestColdBoot):
    """The same on the Python that runs this; everything else is on the oldest one."""

    python = sys.executable


class TestText(unittest.TestCase):
    """What the one file has to be, to go out as a start-up script and run on what is there."""

    program = "boot"

    def setUp(self) -> None:
        self.text = program_text(self.program)
        self.tree = ast.parse(self.text, feature_version=(3, 10))

    def test_it_begins_as_a_script_and_fits_into_metadata(self) -> None:
        self.assertEqual(self.text.split("\n")[0], "#!/usr/bin/env python3")
        self.assertLess(len(self.text.encode()), 64_000)  # a metadata value holds 256 kB

    def test_what_runs_is_ascii(self) -> None:
        self.assertTrue(ast.unparse(self.tree).isascii())

    def test_it_is_made_of_this_section_and_the_standard_library_alone(self) -> None:
        made_of = bundle(f"forge.programs.{self.program}", ROOT)
        self.assertEqual(made_of.third_party, ())
        for module in made_of.modules[:-1]:
            self.assertTrue(module.startswith("forge.machine."), module)
        self.assertEqual(made_of.modules[-1], f"forge.programs.{self.program}")
        names = {
            name.name
            for node in ast.walk(self.tree)
            for name in getattr(node, "names", ())
            if isinstance(node, ast.Import)
        }
        self.assertIn("fcntl", names)
        self.assertNotIn("tomllib", names)  # of 3.11

    def test_it_knows_no_shell(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                self.assertNotIn("shell", {keyword.arg for keyword in node.keywords})
                self.assertNotIn(ast.unparse(node.func), {"os.system", "os.popen", "eval", "exec"})


if __name__ == "__main__":
    unittest.main()
