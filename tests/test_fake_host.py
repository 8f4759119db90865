"""The fake machines: they boot what they were sent, keep containers as docker does, and end.

Machines are made by the stand-in for gcloud; most boot a small script of these tests, one the real
boot program of the Google rigs.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from forge.suites.fake_gcloud import fake_gcloud
from forge.suites.fake_google import FakeGoogle
from forge.suites.fake_host import FakeHost, FakeHosts
from tests.boot_sandbox import program_text

PROJECT, ZONE = "fake-proj", "us-east5-b"
PATIENCE_S = 60.0
CANARY = "hf_CanaryCanaryCanary0123456789abcdef"
ACCOUNT = "rig@fake-proj.iam.gserviceaccount.com"
HELLO = "#!/usr/bin/env python3\nprint('hello from the boot')\n"
RUN = ("docker", "run", "--detach", "--name", "vllm")
IMAGE = ("vllm/vllm-tpu:nightly", "vllm", "serve", "some/model", "--port", "8000")
DOCUMENT = {
    "v": 1,
    "rig": "tpu-vllm-v6e1-2b",
    "project": PROJECT,
    "image": IMAGE[0],
    "container": [
        *(*RUN, "--restart", "unless-stopped", "--publish", "127.0.0.1:8000:8000"),
        *("--env-file", "/run/gemma4/token.env", *IMAGE),
    ],
    "health": "http://127.0.0.1:8000/health",
    "metrics": "http://127.0.0.1:8000/metrics",
    "marks": {"weights": [r"\] Loading model"], "compile": [r"\] Precompile all"]},
    "used": ["vllm:num_requests_running", "vllm:generation_tokens_total"],
    "secret": "hf-token",
    "token_file": "/run/gemma4/token.env",
    "cache": {"folder": "/var/lib/gemma4/cache", "bucket": ""},
    "idle_minutes": 0,
    "life_s": 14_400,
    "leave": f"https://compute.googleapis.com/compute/v1/projects/{PROJECT}/zones/{ZONE}"
    "/instances/rig-1",
}


class HostCase(unittest.TestCase):
    """A fake Google with machines that run, and a gcloud that makes them."""

    automatic = True

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.cloud = self.enterContext(FakeGoogle(PROJECT))
        hosts = FakeHosts(self.cloud, self.folder / "hosts", minute_s=1, automatic=self.automatic)
        self.hosts = self.enterContext(hosts)
        fake_gcloud(self.hosts.bin)
        self.surroundings = self.cloud.environment(self.folder, str(self.hosts.bin))

    def gcloud(self, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        program = str(self.hosts.bin / "gcloud")
        return subprocess.run(
            [program, *words, f"--project={PROJECT}", "--quiet"],
            env=self.surroundings,
            input=given,
            capture_output=True,
            text=True,
        )

    def create(self, script: str = HELLO, document: Any = None, name: str = "rig-1") -> None:
        (self.folder / "start").write_text(script)
        files = f"startup-script={self.folder / 'start'}"
        if document is not None:
            (self.folder / "document").write_text(json.dumps(document))
            files += f",gemma4-boot={self.folder / 'document'}"
        made = self.gcloud(
            *(
                "compute",
                "instances",
                "create",
                f"--zone={ZONE}",
                "--machine-type=ct6e-standard-1t",
            ),
            *("--image-family=x", "--image-project=y", "--provisioning-model=FLEX_START"),
            *("--scopes=cloud-platform", f"--service-account={ACCOUNT}", "--async"),
            *(f"--metadata-from-file={files}", "--format=json", name),
        )
        self.assertEqual(made.returncode, 0, made.stderr)

    def machine(self, script: str = HELLO, document: Any = None) -> FakeHost:
        self.create(script, document)
        return self.hosts.host("rig-1")

    def until(self, holds: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            self.assertLess(time.monotonic(), end, "it did not come to that")
            time.sleep(0.05)

    def marked(self, host: FakeHost) -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("FAKE_MACHINE") == str(host.folder):
                    found.append(process.pid)
            except (psutil.Error, OSError):
                continue
        return found

    def ask(self, host: FakeHost, path: str) -> tuple[int, bytes]:
        line = http.client.HTTPConnection("127.0.0.1", host.port, timeout=30)
        try:
            line.request("GET", path)
            answer = line.getresponse()
            return answer.status, answer.read()
        finally:
            line.close()

    def served(self, host: FakeHost) -> bool:
        try:
            return self.ask(host, "/health")[0] == 200
        except OSError:
            return False


class BootTest(HostCase):
    """What a machine is from the create on, without anybody's doing."""

    def test_the_script_that_was_sent_runs_and_its_words_are_on_the_serial_port(self) -> None:
        host = self.machine()
        self.until(lambda: "hello from the boot" in host.console())
        shown = self.gcloud(
            *("compute", "instances", "get-serial-port-output", f"--zone={ZONE}", "rig-1"),
            "--format=json",
        )
        text = json.loads(shown.stdout)["contents"]
        line = (
            r"rig-1 google_metadata_script_runner\[\d+\]: startup-script: hello from the boot\r\n"
        )
        self.assertRegex(text, line)

    def test_a_machine_that_waits_does_not_run_yet(self) -> None:
        self.cloud.script.queue_s = 600
        host = self.machine()
        self.assertFalse(host.runs())
        refused = self.gcloud("compute", "ssh", f"--zone={ZONE}", "rig-1", "--command=true")
        self.assertEqual(refused.returncode, 1)
        self.assertIn("Could not SSH into the instance", refused.stderr)
        self.assertEqual(self.marked(host), [])
        self.cloud.advance(601)
        self.until(lambda: "hello from the boot" in host.console())

    def test_what_the_script_finds_around_it(self) -> None:
        script = f"""#!/usr/bin/env python3
import http.client, json, os
def ask(path, **headers):
    line = http.client.HTTPConnection(os.environ["GCE_METADATA_HOST"], timeout=30)
    line.request("GET", "/computeMetadata/v1/" + path, headers=headers)
    answer = line.getresponse()
    return answer.status, answer.read().decode()
flavor = {{"Metadata-Flavor": "Google"}}
print(json.dumps([
    ask("instance/name")[0],
    ask("instance/name", **flavor), ask("project/project-id", **flavor),
    ask("instance/attributes/nothing", **flavor)[0],
    ask("instance/service-accounts/default/email", **flavor),
    ask("instance/attributes/gemma4-boot", **flavor),
    sorted(os.environ),
]))
open("/dev/null" if False else os.environ["GEMMA4_ROOT"] + "/dev/console", "a").write("console\\n")
print({CANARY!r} in str(os.environ))
"""
        host = self.machine(script, DOCUMENT)
        self.until(lambda: "False" in host.console() and "console\r\n" in host.console())
        found = re.search(r"startup-script: (\[.*\])", host.console())
        assert found is not None, host.console()
        without, name, project, nothing, email, document, variables = json.loads(found[1])
        self.assertEqual((without, nothing), (403, 404))
        self.assertEqual(name, [200, "rig-1"])
        self.assertEqual(project, [200, PROJECT])
        self.assertEqual(email, [200, ACCOUNT])
        # Only its own ways differ: to its port, and to Google.
        seen = json.loads(document[1])
        self.assertEqual(seen["health"], f"http://127.0.0.1:{host.port}/health")
        self.assertIn(f"127.0.0.1:{host.port}:8000", seen["container"])
        self.assertRegex(seen["leave"], r"^http://127\.0\.0\.1:\d+/compute/v1/projects/fake-proj/")
        self.assertEqual(
            {**seen, "health": 0, "metrics": 0, "container": 0, "leave": 0},
            {**DOCUMENT, "health": 0, "metrics": 0, "container": 0, "leave": 0},
        )
        self.assertNotIn("CLOUDSDK_CONFIG", variables)
        self.assertIn("GEMMA4_ROOT", variables)

    def test_it_ends_with_the_machine_whoever_ends_that(self) -> None:
        script = "#!/usr/bin/env python3\nimport time\nprint('up', flush=True)\ntime.sleep(300)\n"
        ends: tuple[Callable[[], Any], ...] = (
            lambda: self.cloud.preempt("rig-1"),
            lambda: self.gcloud("compute", "instances", "delete", f"--zone={ZONE}", "rig-1"),
            lambda: self.cloud.compute.shut_down("rig-1"),
            lambda: self.hosts.host("rig-1").run("shutdown", "-h", "now"),
        )
        for number, end in enumerate(ends):
            with self.subTest(number):
                host = self.machine(script)
                self.until(lambda: "up" in host.console())  # noqa: B023
                self.assertTrue(self.marked(host))
                end()
                self.until(lambda: not self.marked(host))  # noqa: B023
                self.cloud.compute.instances.clear()
                self.cloud.compute.disks.clear()
                self.until(lambda: not self.hosts.machines())

    def test_nothing_is_left_when_the_machines_owner_goes(self) -> None:
        host = self.machine()
        host.run(*RUN, "--restart", "always", "--publish", f"127.0.0.1:{host.port}:8000", *IMAGE)
        self.until(lambda: self.served(host))
        self.hosts.__exit__()
        self.assertEqual(self.marked(host), [])
        self.hosts.__enter__()

    def test_a_machine_of_the_same_name_is_another_one(self) -> None:
        first = self.machine()
        self.gcloud("compute", "instances", "delete", f"--zone={ZONE}", "rig-1")
        second = self.machine()
        self.assertNotEqual(first.alias, second.alias)
        self.assertNotEqual(first.root, second.root)

    def test_a_node_of_the_other_service(self) -> None:
        (self.folder / "start").write_text(HELLO.replace("print", "open('seen', 'w').write"))
        made = self.gcloud(
            *("compute", "tpus", "queued-resources", "create", "q1", "--zone=us-west4-a"),
            *("--node-id=n1", "--accelerator-type=v5litepod-1", "--runtime-version=v"),
            *(f"--metadata-from-file=startup-script={self.folder / 'start'}", "--async"),
        )
        self.assertEqual(made.returncode, 0, made.stderr)
        host = self.hosts.host("n1")
        self.assertTrue(host.alias.startswith("tpu."))
        self.until(lambda: (host.root / "seen").exists())
        words = ("ssh", "n1", "--zone=us-west4-a", "--worker=0", "--tunnel-through-iap")
        done = self.gcloud("alpha", "compute", "tpus", "tpu-vm", *words, "--command=cat ../seen")
        self.assertEqual(done.stdout, "hello from the boot", done.stderr)
        host.run("shutdown", "-h", "now")
        self.until(lambda: not self.marked(host) and not host.runs())


class DockerTest(HostCase):
    """docker on a machine, asked as a boot and its owner ask it."""

    def setUp(self) -> None:
        super().setUp()
        self.host = self.machine()
        self.until(lambda: "hello" in self.host.console())

    def docker(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = self.host.run("docker", *words)
        self.assertEqual(done.returncode, status, done.stderr)
        return done

    def start(self, *options: str) -> None:
        publish = f"127.0.0.1:{self.host.port}:8000"
        made = self.docker(*RUN[1:], "--publish", publish, *options, *IMAGE)
        self.assertRegex(made.stdout, r"^[0-9a-f]{64}\n$")
        self.until(lambda: self.served(self.host))

    def state(self) -> dict[str, Any]:
        return dict(json.loads(self.docker("inspect", "--type", "container", "vllm").stdout)[0])

    def test_a_container_serves_and_is_told_of(self) -> None:
        self.start("--env", "A=b c", "--volume", "/x:/y")
        self.assertEqual(
            json.loads(self.ask(self.host, "/v1/models")[1])["data"][0]["id"], "some/model"
        )
        found = self.state()
        self.assertEqual(found["State"]["Status"], "running")
        self.assertEqual(found["RestartCount"], 0)
        self.assertEqual(found["Config"]["Cmd"][:2], ["vllm", "serve"])
        self.assertIn("A=b c", found["Config"]["Env"])
        self.assertIn("vllm", self.docker("ps").stdout)
        (begun,) = self.host.engine.starts()
        self.assertEqual(begun["environment"]["A"], "b c")
        self.assertEqual(begun["argv"], list(IMAGE[2:]))

    def test_both_streams_of_the_log_its_tail_and_its_times(self) -> None:
        self.host.engine.script(log="a line of trouble")
        self.start()
        whole = self.docker("logs", "vllm")
        self.assertIn("Precompile all the subgraphs", whole.stdout)
        self.assertIn("a line of trouble\n", whole.stderr)
        self.assertIn("startup complete", whole.stderr)
        last = self.docker("logs", "--tail", "1", "vllm")
        self.assertEqual(len((last.stdout + last.stderr).splitlines()), 1)
        stamped = self.docker("logs", "--timestamps", "vllm")
        moment = sorted(stamped.stderr.split()[0:1] + stamped.stdout.split()[0:1])[0]
        self.assertRegex(moment, r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z$")
        both = self.docker("logs", "--since", moment, "vllm")
        self.assertEqual((both.stdout, both.stderr), (whole.stdout, whole.stderr))
        none = self.docker("logs", "--until", moment, "vllm")
        self.assertEqual(none.stdout + none.stderr, "")

    def test_stop_start_restart_and_rm(self) -> None:
        self.start("--restart", "unless-stopped")
        first = self.state()["State"]
        self.assertEqual(self.docker("stop", "vllm").stdout, "vllm\n")
        stopped = self.state()["State"]
        self.assertEqual((stopped["Status"], stopped["Running"]), ("exited", False))
        self.assertFalse(psutil.pid_exists(first["Pid"]) and self.served(self.host))
        self.assertEqual(self.docker("start", "vllm").stdout, "vllm\n")
        self.until(lambda: self.served(self.host))
        self.docker("start", "vllm")  # runs already
        again = self.state()["State"]
        self.assertGreater(again["StartedAt"], first["StartedAt"])
        self.docker("restart", "vllm")
        self.until(lambda: self.served(self.host))
        self.assertNotEqual(self.state()["State"]["Pid"], again["Pid"])
        self.assertIn("cannot remove", self.docker("rm", "vllm", status=1).stderr)
        self.docker("rm", "--force", "vllm")
        for words in (("logs",), ("start",), ("stop",), ("restart",), ("rm",), ("inspect",)):
            done = self.docker(*words, "vllm", status=1)
            self.assertIn("No such container: vllm", done.stderr)
        self.assertEqual(self.docker("inspect", "vllm", status=1).stdout, "[]\n")
        self.docker("rm", "--force", "vllm")

    def test_a_container_that_dies_is_started_again_where_it_was_asked_for(self) -> None:
        self.host.engine.script(crash="out of luck")
        self.docker(*RUN[1:], "--restart", "unless-stopped", *IMAGE)
        self.until(lambda: self.state()["RestartCount"] >= 2)
        found = self.state()
        self.assertIn("RuntimeError: out of luck", self.docker("logs", "vllm").stderr)
        self.host.engine.script()
        self.until(lambda: self.state()["State"]["Status"] == "running")
        self.docker("stop", "vllm")
        self.assertEqual(self.state()["State"]["Status"], "exited")
        self.assertGreaterEqual(self.state()["RestartCount"], found["RestartCount"])

    def test_a_container_that_dies_for_good(self) -> None:
        self.host.engine.script(crash="out of luck")
        self.docker(*RUN[1:], *IMAGE)
        self.until(lambda: self.state()["State"]["Status"] == "exited")
        found = self.state()
        self.assertEqual((found["State"]["ExitCode"], found["RestartCount"]), (1, 0))
        self.assertFalse(found["State"]["OOMKilled"])

    def test_a_container_that_the_kernel_kills(self) -> None:
        self.start()
        self.host.script(oom=True)
        self.until(lambda: self.state()["State"]["Status"] == "exited")
        state = self.state()["State"]
        self.assertEqual((state["ExitCode"], state["OOMKilled"]), (137, True))
        self.assertEqual(self.events(), ["oom"])

    def test_a_kill_for_memory_is_remembered_when_the_next_run_is_on(self) -> None:
        self.host.engine.script(pace_s=0.0)
        self.docker(*RUN[1:], "--restart", "unless-stopped", *IMAGE)
        self.assertEqual(self.events(), [])
        self.host.script(oom=True)
        self.until(lambda: self.state()["RestartCount"] >= 1)
        self.host.script()
        self.until(lambda: self.state()["State"]["Running"])
        self.assertFalse(self.state()["State"]["OOMKilled"])
        self.assertIn("oom", self.events())

    def events(self, kind: str = "oom") -> list[str]:
        """Those of the container, from its creation to now."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S.999999999Z", time.gmtime(time.time() + 60))
        span = ("--since", "2026-01-01T00:00:00.000000000Z", "--until", now)
        kinds = ("--filter", "container=vllm", "--filter", f"event={kind}")
        return self.docker("events", *span, *kinds, "--format", "{{.Action}}").stdout.splitlines()

    def test_images(self) -> None:
        image = "vllm/vllm-tpu:nightly"
        missing = self.docker("image", "inspect", image, status=1)
        self.assertEqual(missing.stdout, "[]\n")
        self.assertIn(f"No such image: {image}", missing.stderr)
        pulled = self.docker("pull", image).stdout
        self.assertEqual(pulled.count(": Pull complete"), pulled.count(": Pulling fs layer"))
        digests = json.loads(self.docker("image", "inspect", image).stdout)[0]["RepoDigests"]
        self.assertRegex(digests[0], r"^vllm/vllm-tpu@sha256:[0-9a-f]{64}$")
        pinned = "vllm/vllm-tpu@sha256:" + "a" * 64
        self.docker("pull", pinned)
        self.assertIn(pinned, self.docker("image", "inspect", pinned).stdout)

    def test_what_docker_refuses(self) -> None:
        self.start()
        twice = self.docker(*RUN[1:], *IMAGE, status=125)
        self.assertIn("Conflict. The container name", twice.stderr)
        self.assertIn(
            "unknown flag: --no-such", self.docker("run", "--no-such", "x", status=125).stderr
        )
        self.assertIn("requires at least 1", self.docker("run", "--detach", status=125).stderr)
        gone = self.docker("run", "--env-file", "/run/none", "x", status=125)
        self.assertIn("/run/none: no such file", gone.stderr)
        self.assertIn("unknown command", self.docker("frobnicate", status=1).stderr)
        self.host.script(pull="Error response from daemon: manifest unknown", daemon=False)
        self.assertIn("manifest unknown", self.docker("pull", "x", status=1).stderr)
        self.host.script(daemon=True)
        for words in (("version",), ("ps",), ("logs", "vllm")):
            self.assertIn("Is the docker daemon running", self.docker(*words, status=1).stderr)

    def test_the_containers_come_back_with_the_machine(self) -> None:
        self.start("--restart", "unless-stopped")
        self.assertEqual(self.host.reboot(), 0)
        self.until(lambda: self.served(self.host))
        self.docker("stop", "vllm")
        self.host.reboot()
        self.assertEqual(self.state()["State"]["Status"], "exited")


class MachineTest(HostCase):
    """The rest of a machine's programs."""

    def setUp(self) -> None:
        super().setUp()
        self.host = self.machine()
        self.until(lambda: "hello" in self.host.console())

    def test_a_service_runs_is_kept_running_and_starts_with_the_machine(self) -> None:
        unit = self.host.root / "etc/systemd/system/beat.service"
        unit.parent.mkdir(parents=True)
        program = self.host.root / "beat.py"
        program.write_text(
            "import os, time\nopen(os.environ['GEMMA4_ROOT'] + '/beats', 'a').write('.')\n"
            "time.sleep(0.1)\n"
        )
        unit.write_text(f"[Service]\nExecStart={sys.executable} {program}\nRestart=always\n")
        beats = self.host.root / "beats"
        missing = self.host.run("systemctl", "enable", "--now", "other.service")
        self.assertIn("does not exist", missing.stderr)
        self.assertEqual(self.host.run("systemctl", "daemon-reload").returncode, 0)
        self.assertEqual(self.host.run("systemctl", "is-active", "beat.service").returncode, 3)
        self.assertEqual(
            self.host.run("systemctl", "enable", "--now", "beat.service").returncode, 0
        )
        self.until(lambda: beats.exists() and len(beats.read_text()) > 2)
        self.assertEqual(self.host.run("systemctl", "is-active", "beat.service").stdout, "active\n")
        self.host.stop()
        seen = len(beats.read_text())
        self.host.boot()
        self.until(lambda: len(beats.read_text()) > seen + 1)
        self.host.run("systemctl", "stop", "beat.service")
        self.until(lambda: not [p for p in self.marked(self.host)])

    def test_sudo_and_what_is_not_there(self) -> None:
        self.assertEqual(self.host.run("sudo", "-n", "cat", "/dev/null").returncode, 0)
        self.assertIn("command not found", self.host.run("sudo", "ls-of-no-kind").stderr)

    def test_docker_can_be_missing_and_be_installed(self) -> None:
        self.hosts.orders = {"docker": False}
        self.create(name="rig-2")
        host = self.hosts.host("rig-2")
        self.assertFalse((host.folder / "bin" / "docker").exists())
        host.script(apt="E: Could not get lock /var/lib/dpkg/lock-frontend")
        self.assertEqual(host.run("apt-get", "install", "--yes", "docker.io").returncode, 100)
        host.script()
        host.run("apt-get", "update")
        self.assertEqual(host.run("apt-get", "install", "--yes", "docker.io").returncode, 0)
        version = host.run("docker", "version", "--format", "{{.Server.Version}}")
        self.assertRegex(version.stdout, r"^\d+\.\d+\.\d+\n$")

    def test_a_bucket(self) -> None:
        source = self.host.root / "cache"
        source.mkdir()
        (source / "a").write_text("compiled")
        sync = ("gcloud", "storage", "rsync", "--recursive")
        saved = self.host.run(*sync, str(source), "gs://bucket/rig")
        self.assertEqual(saved.returncode, 0, saved.stderr)
        target = self.host.root / "again"
        self.host.run(*sync, "gs://bucket/rig", str(target))
        self.assertEqual((target / "a").read_text(), "compiled")
        self.assertEqual(self.host.run(*sync, "gs://none/rig", str(target)).returncode, 1)
        self.host.script(bucket="ERROR: 403")
        self.assertIn("403", self.host.run(*sync, "gs://bucket/rig", str(target)).stderr)

    def test_each_program_that_was_run_is_on_record(self) -> None:
        self.host.run("docker", "ps", "--all")
        self.assertEqual(self.host.programs()[-1], ["docker", "ps", "--all"])


class RealBootTest(HostCase):
    """The boot program of the Google rigs, as it is, on such a machine."""

    def setUp(self) -> None:
        super().setUp()
        payload = base64.b64encode(CANARY.encode()).decode()
        self.cloud.secrets.payloads["hf-token"] = [payload]

    def booted(self, **changes: Any) -> tuple[int, FakeHost]:
        self.create(program_text("boot"), {**DOCUMENT, **changes})
        host = self.hosts.host("rig-1")
        self.until(lambda: re.search(r"(ready done|\w+ failed) ", host.console()))
        return host.booted(), host

    def test_to_a_model_that_answers(self) -> None:
        status, host = self.booted()
        self.assertEqual(status, 0, host.console())
        self.assertTrue(self.served(host))
        (begun,) = host.engine.starts()
        self.assertEqual(begun["environment"]["HF_TOKEN"], "given")
        self.assertNotIn(CANARY, host.console())
        self.assertNotIn(CANARY, json.dumps(host.programs()))

    def test_what_goes_wrong_by_the_script(self) -> None:
        cases: tuple[tuple[dict[str, Any], str], ...] = (
            ({"pull": "Error response from daemon: manifest unknown"}, "manifest unknown"),
            ({"secret": "Permission 'secretmanager.versions.access' denied"}, "versions.access"),
            ({"account": False}, "no service account"),
            ({"run": "could not select device driver"}, "weights failed"),
        )
        for orders, words in cases:
            with self.subTest(words):
                self.hosts.orders = orders
                status, host = self.booted()
                self.assertEqual(status, 1)
                failed = [line for line in host.console().splitlines() if " failed " in line]
                self.assertIn(words, failed[0])
                self.gcloud("compute", "instances", "delete", f"--zone={ZONE}", "rig-1")

    def test_a_machine_that_nobody_uses_deletes_itself(self) -> None:
        status, host = self.booted(idle_minutes=3)
        self.assertEqual(status, 0, host.console())
        self.until(lambda: not self.cloud.held().get("instances"))
        deletes = [
            one
            for one in self.cloud.compute.operations.values()
            if one["operationType"] == "delete"
        ]
        self.assertEqual([one["user"] for one in deletes], [ACCOUNT])
        self.until(lambda: not self.marked(host))

    def test_a_machine_that_may_not_delete_itself_shuts_down(self) -> None:
        self.hosts.orders = {"leave": "Required 'compute.instances.delete' permission"}
        status, host = self.booted(idle_minutes=3)
        self.assertEqual(status, 0, host.console())
        self.until(lambda: host.machine().get("status") == "TERMINATED")
        self.until(lambda: not self.marked(host))
        self.assertIn("idle note", (host.root / "var/lib/gemma4/boot.log").read_text())


if __name__ == "__main__":
    unittest.main()
