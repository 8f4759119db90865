"""boot.py as the process that it is on a rented machine: a sandbox for its root, programs on its
PATH that behave as docker, apt and systemd do, and a metadata server on loopback."""

from __future__ import annotations

import ast
import base64
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from forge.parts.knowledge.boot_marks import boot_state
from forge.suites.fake_google import FakeGoogle

BOOT = Path(__file__).resolve().parents[1] / "forge" / "programs" / "boot.py"
IMAGE = "vllm/vllm-tpu@sha256:" + "ab" * 32
TOKEN = "hf_" + "CanaryOfTheHub0815"
PLAIN_TOKEN = "canary-without-a-shape"
ACCESS = "ya29.CanaryOfTheMachine0815"
WEIGHTS_LINE = "INFO [tpu_runner.py:1] Starting to load model google/gemma-4-E2B-it"
COMPILE_LINE = "INFO [compilation.py:1] Precompile all the subgraphs"
PATIENCE_S = 30.0

# One text for all programs. It notes each argument list, and keeps docker's world in a JSON file.
# What docker prints is in its words, error streams and exit codes.
STUB = r'''#!{python} -SE
import fcntl, json, os, sys, time
here, root = {here!r}, os.environ["GEMMA4_ROOT"]
name, argv = os.path.basename(sys.argv[0]), sys.argv[1:]


class World:
    """world.json under a lock, written back at the end."""

    def __enter__(self):
        self.lock = open(here + "/lock", "a")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.data = json.load(open(here + "/world.json"))
        return self.data

    def __exit__(self, *_):
        with open(here + "/world.new", "w") as file:
            json.dump(self.data, file)
        os.replace(here + "/world.new", here + "/world.json")
        self.lock.close()


def fail(words, code=1):
    print(words, file=sys.stderr)
    sys.exit(code)


def stamp(at):
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + ("%.9fZ" % (at % 1))[1:]


with open(here + "/journal.jsonl", "a") as file:
    file.write(json.dumps([name, *argv]) + "\n")
    file.flush()
with World() as world:
    fault = world["faults"].get(" ".join([name, *argv[:1]]), [])
    said = fault.pop(0) if fault else ""
    hangs = name == "docker" and argv[0] == world.get("hangs")
if hangs:
    time.sleep(600)
if said:
    fail(said, 125 if argv[:1] == ["run"] else 1)


def make_container(world, argv):
    given = dict(zip(argv, argv[1:]))
    called, env = given["--name"], []
    if called in world["containers"]:
        fail('docker: Error response from daemon: Conflict. The container name "/%s" is already '
             'in use by container "0123".' % called, 125)
    if "--env-file" in given:
        path = root + given["--env-file"]
        world["token_mode"] = oct(os.stat(path).st_mode & 0o777)
        env = open(path).read().split()
    one = world["containers"][called] = {{"argv": argv, "env": env, "restarts": 0}}
    start(one, world)


def start(one, world):
    one.update(status="running", code=0, oom=False, at=time.time())
    one.setdefault("log", []).extend([time.time(), *line] for line in world["log"])


def docker(world):
    word, called = argv[0], argv[-1]
    one = world["containers"].get(called)
    if word == "version":
        print("24.0.7")
    elif argv[:2] == ["image", "inspect"]:
        if called not in world["images"] and not called.startswith("sha256:"):
            print("[]")
            fail("Error response from daemon: No such image: " + called)
        print(json.dumps([{{"Id": "sha256:77", "RepoDigests": world["images"]}}]))
    elif word == "events" and "--until" in argv:  # without an end it would go on listening
        given = dict(zip(argv, argv[1:]))
        (of,) = [a.partition("=")[2] for a in argv if a.startswith("container=")]
        for at, action in world["containers"][of].get("events", []):
            inside = given["--since"] <= stamp(at) <= given["--until"]
            if inside and f"event={{action}}" in argv:
                print(action)
    elif word == "run":
        make_container(world, argv)
        print("0123456789ab")
    elif word == "inspect" and one:
        running = one["status"] == "running"
        state = {{"Status": one["status"], "Running": running, "ExitCode": one["code"]}}
        state.update(OOMKilled=one["oom"], StartedAt=stamp(one["at"]))
        print(json.dumps([{{"Image": "sha256:77", "RestartCount": one["restarts"], "State": state,
                           "Config": {{"Env": one["env"]}}}}]))
    elif word == "inspect":
        print("[]")
        fail("Error: No such container: " + called)
    elif not one:
        fail("Error response from daemon: No such container: " + called)
    elif word == "logs":
        given = dict(zip(argv, argv[1:]))
        kept = [line for line in one["log"] if stamp(line[0]) >= given.get("--since", "")]
        kept = [line for line in kept if stamp(line[0]) < given.get("--until", "9")]
        for _, stream, text in kept[-int(given["--tail"]):]:
            print(text, file=sys.stderr if stream == "err" else sys.stdout, flush=True)
    elif word == "rm":
        del world["containers"][called]
        print(called)
    elif word == "stop":
        one.update(status="exited", code=137)
        print(called)
    elif word in ("start", "restart"):
        start(one, world)
        print(called)
    else:
        fail("docker: %r is not a docker command." % word)


if name == "docker" and argv[0] == "pull":
    print("ab12: Pulling fs layer\ncd34: Pulling fs layer\nab12: Pull complete", flush=True)
    while True:
        with World() as world:
            if not world["pull_waits"]:
                break
        time.sleep(0.05)
    with World() as world:
        world["images"].append(argv[1])
    print("cd34: Pull complete\nStatus: Downloaded newer image for " + argv[1])
elif name == "docker":
    with World() as world:
        docker(world)
elif name == "apt-get" and argv[0] == "install":
    os.symlink(sys.argv[0], os.path.join(os.path.dirname(sys.argv[0]), "docker"))
'''


Answer = tuple[int, str]


class Cloud(ThreadingHTTPServer):
    """Metadata, the secret, the model server's pages and the API that deletes, on one port.

    `answers` is by method and path: status and body, or what makes them. `requests` keeps method,
    path and headers.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CloudHandler)
        self.answers: dict[str, Answer | Callable[[], Answer]] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.host = f"127.0.0.1:{self.server_address[1]}"
        self.base = f"http://{self.host}"


class _CloudHandler(BaseHTTPRequestHandler):
    def answer(self) -> None:
        cloud = self.server
        assert isinstance(cloud, Cloud)
        cloud.requests.append((self.command, self.path, dict(self.headers)))
        path = self.path.partition("?")[0]
        known = cloud.answers.get(f"{self.command} {path}", (404, "<html>no</html>"))
        status, body = known() if callable(known) else known
        if path.startswith("/computeMetadata") and self.headers["Metadata-Flavor"] != "Google":
            status, body = 403, "Missing Metadata-Flavor:Google header."
        self.send_response(status)
        if status == 302:
            self.send_header("Location", body)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_DELETE = answer

    def log_message(self, *_: Any) -> None:
        pass


def google_error(status: int, message: str) -> tuple[int, str]:
    """A refusal in the form of Google's APIs."""
    return status, json.dumps({"error": {"code": status, "message": message}})


def secret_answer(token: str) -> tuple[int, str]:
    data = base64.b64encode(token.encode()).decode()
    return 200, json.dumps({"name": "n", "payload": {"data": data}})


META = "/computeMetadata/v1/instance"
SECRET = "/v1/projects/fake-proj/secrets/hf-token/versions/latest:access"
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
"""


class Sandbox(unittest.TestCase):
    """An empty machine with docker, and a cloud around it that lets everything succeed."""

    minute_s = 1.0

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.root, self.bin, self.stubs = (self.folder / n for n in ("root", "bin", "stubs"))
        for folder in (self.root / "dev", self.root / "proc", self.bin, self.stubs):
            folder.mkdir(parents=True)
        (self.root / "dev" / "console").touch()
        (self.root / "proc" / "meminfo").write_text("MemTotal: 2048 kB\nMemAvailable: 1024 kB\n")
        stub = self.bin / "stub"
        stub.write_text(STUB.format(python=sys.executable, here=str(self.stubs)))
        stub.chmod(0o755)
        for name in ("docker", "systemctl", "shutdown", "gcloud"):
            (self.bin / name).symlink_to(stub)
        world = {"containers": {}, "images": [], "log": [], "faults": {}, "pull_waits": False}
        (self.stubs / "world.json").write_text(json.dumps(world))
        self.cloud = Cloud()
        serving = threading.Thread(target=self.cloud.serve_forever, args=(0.02,), daemon=True)
        serving.start()
        self.addCleanup(serving.join)
        self.addCleanup(self.cloud.server_close)
        self.addCleanup(self.cloud.shutdown)
        self.addCleanup(self.end_strays)
        self.document = self.make_document()
        self.cloud.answers = {
            f"GET {META}/service-accounts/default/token": (
                200,
                json.dumps({"access_token": ACCESS, "expires_in": 3599, "token_type": "Bearer"}),
            ),
            f"GET {SECRET}": secret_answer(TOKEN),
            "GET /health": (200, ""),
            "GET /metrics": (200, METRICS.format(running="0.0", tokens="0.0")),
        }
        self.give(self.document)

    def make_document(self) -> dict[str, Any]:
        argv = ["docker", "run", "--detach", "--name", "vllm", "--restart", "unless-stopped"]
        argv += ["--publish", "127.0.0.1:8000:8000", "--env-file", "/run/gemma4/token.env"]
        return {
            "v": 1,
            "rig": "tpu-vllm-v6e1-2b",
            "project": "fake-proj",
            "image": IMAGE,
            "container": [*argv, IMAGE, "vllm", "serve", "google/gemma-4-E2B-it"],
            "health": f"{self.cloud.base}/health",
            "metrics": f"{self.cloud.base}/metrics",
            "marks": {
                "weights": [r"\] Starting to load model "],
                "compile": [r"\] Precompile all"],
            },
            "used": ["vllm:num_requests_running", "vllm:generation_tokens_total"],
            "secret": "hf-token",
            "token_file": "/run/gemma4/token.env",
            "cache": {"folder": "/var/lib/gemma4/cache", "bucket": ""},
            "idle_minutes": 30,
            "life_s": 14_400,
            "leave": "",
        }

    # -- the world around

    def give(self, document: Any) -> None:
        """What the metadata server has as the boot document from now on."""
        text = document if isinstance(document, str) else json.dumps(document)
        self.cloud.answers[f"GET {META}/attributes/gemma4-boot"] = (200, text)

    def world(self, **changes: Any) -> dict[str, Any]:
        """docker's world, after these changes."""
        with (self.stubs / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self.stubs / "world.json"
            world: dict[str, Any] = json.loads(path.read_text()) | changes
            path.write_text(json.dumps(world))
        return world

    def change_container(self, *log: str, **changes: Any) -> None:
        """The container goes on: lines that it writes, then what becomes of it."""
        containers = self.world()["containers"]
        containers["vllm"]["log"] += [[time.time(), "err", line] for line in log]
        containers["vllm"].update(changes)
        self.world(containers=containers)

    def ran(self, *begin: str) -> list[list[str]]:
        """The argument lists of programs that were started, those that begin so."""
        path = self.stubs / "journal.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        argvs: list[list[str]] = [json.loads(line) for line in lines]
        return [argv for argv in argvs if argv[: len(begin)] == list(begin)]

    def asked(self, method: str, path: str) -> list[dict[str, str]]:
        """The headers of the requests to a path."""
        return [h for m, p, h in list(self.cloud.requests) if m == method and p.startswith(path)]

    # -- the program

    def environment(self, **more: str) -> dict[str, str]:
        return {
            "PATH": str(self.bin),
            "GEMMA4_ROOT": str(self.root),
            "GCE_METADATA_HOST": self.cloud.host,
            "GEMMA4_SECRETS_URL": self.cloud.base,
            "GEMMA4_MINUTE_S": str(self.minute_s),
            **more,
        }

    def start(self, *argv: str, program: Path = BOOT, **more: str) -> subprocess.Popen[str]:
        """The program under way; it is ended with the test."""
        process = subprocess.Popen(
            [sys.executable, str(program), *argv],
            env=self.environment(**more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.addCleanup(self.end, process)
        return process

    def end(self, process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            process.kill()
        process.communicate()

    def end_strays(self) -> None:
        """Ends what the program left in the background: what names this test's own folder."""
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = entry.read_bytes().split(b"\0")
                if str(self.root / "var/lib/gemma4/boot.py").encode() in words:
                    os.kill(int(entry.parent.name), signal.SIGKILL)

    def boot(self, **more: str) -> tuple[int, str]:
        """Exit status and output of a whole boot."""
        process = self.start(**more)
        output, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, output

    def act(self, word: str, **given: Any) -> subprocess.CompletedProcess[str]:
        """An act as ssh brings it: the program on standard input, its data in base64url."""
        data = base64.urlsafe_b64encode(json.dumps(given).encode()).decode().rstrip("=")
        return self.send(word, data)

    def send(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-", *argv],
            env=self.environment(),
            input=BOOT.read_text(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def log(self) -> str:
        path = self.root / "var/lib/gemma4/boot.log"
        return path.read_text() if path.exists() else ""

    def marks(self) -> list[str]:
        """The marks of the log as `phase state`."""
        return [" ".join(line.split(" ")[1:3]) for line in self.log().splitlines()]

    def until(self, what: Callable[[], object], why: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            if time.monotonic() > deadline:
                self.fail(f"{why} never came; the log:\n{self.log()}")
            time.sleep(0.02)

    def forget(self) -> None:
        """Empties log and console: tests boot several times in a second, which no machine does."""
        for path in (self.root / "var/lib/gemma4/boot.log", self.root / "dev" / "console"):
            if path.exists():
                path.write_text("")

    def failure(self) -> str:
        """What the boot failed of, by the console."""
        return boot_state((self.root / "dev" / "console").read_text()).failed

    def assert_watched(self) -> None:
        """The watch is installed and was started: a broken boot still ends."""
        self.assertTrue(self.ran("systemctl", "enable", "--now", "gemma4-idle.service"))
        self.assertEqual((self.root / "var/lib/gemma4/boot.py").read_text(), BOOT.read_text())

    def assert_no_canary(self, *texts: str) -> None:
        """No secret in `texts`, in any argument list, or in a file that docker does not own."""
        found = [path for path in self.folder.rglob("*") if path.is_file()]
        own = {path: path.read_bytes() for path in found if path.name != "world.json"}
        self.assertGreater(len(own), 3)
        for secret in (TOKEN, PLAIN_TOKEN, ACCESS):
            for text in texts:
                self.assertNotIn(secret, text)
            for path, data in own.items():
                self.assertNotIn(secret.encode(), data, path)


class TestColdBoot(Sandbox):
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
        self.assertTrue(boot_state(output).ready)

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
        self.assertTrue(boot_state(self.log()).ready)

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
        self.assertFalse(boot_state(self.log()).ready)
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


class TestDocker(Sandbox):
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


class TestImage(Sandbox):
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


class TestToken(Sandbox):
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


class TestContainer(Sandbox):
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


class TestReboot(Sandbox):
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
        state = boot_state(self.log())
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


class TestDocument(Sandbox):
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


class TestCache(Sandbox):
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
        self.assertTrue(boot_state(self.log()).ready)

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


class Watching(Sandbox):
    """A machine that was booted, on which the watch runs with short minutes."""

    short_s = 0.05
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
        self.assertEqual(boot_state(self.log()).ending, "no use for 8 minutes")
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
        self.assertEqual((python, word), (sys.executable, "idle"))
        process = self.start(word, program=Path(program), GEMMA4_MINUTE_S="0.05")
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


class TestActs(Sandbox):
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

    def test_the_boot_log_is_its_last_lines(self) -> None:
        self.boot()
        self.assertEqual(self.said("boot_log", lines=2), "\n".join(self.log().splitlines()[-2:]))
        self.assertEqual(boot_state(self.said("boot_log")), boot_state(self.log()))

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
        for lines in (0, -1, 5001, True, 1.5, "5", None, [1], "$(touch x)"):
            with self.subTest(lines=lines):
                self.assertEqual(self.act("logs", lines=lines).returncode, 2)
        self.assertEqual(len(self.ran()), before)


class TestText(unittest.TestCase):
    """What the file itself has to be, to go out as a start-up script and run on what is there."""

    def setUp(self) -> None:
        self.text = BOOT.read_text()
        self.tree = ast.parse(self.text, feature_version=(3, 10))

    def test_it_begins_as_a_script_and_fits_into_metadata(self) -> None:
        self.assertEqual(self.text.split("\n")[0], "#!/usr/bin/env python3")
        self.assertTrue(self.text.isascii())
        self.assertLess(len(self.text), 64_000)  # a metadata value holds 256 kB

    def test_it_imports_the_standard_library_alone(self) -> None:
        names = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module).partition(".")[0])
        self.assertEqual(names - set(sys.stdlib_module_names), set())
        self.assertNotIn("tomllib", names)

    def test_it_knows_no_shell(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                self.assertNotIn("shell", {keyword.arg for keyword in node.keywords})
                self.assertNotIn(ast.unparse(node.func), {"os.system", "os.popen", "eval", "exec"})

    def test_an_old_python_runs_it_where_there_is_one(self) -> None:
        python = shutil.which("python3.10") or sys.executable
        if subprocess.run([python, "--version"], capture_output=True).returncode:
            python = sys.executable  # a name on PATH with no Python behind it
        data = base64.urlsafe_b64encode(b"{}").decode()
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [python, str(BOOT), "boot_log", data],
                env={"GEMMA4_ROOT": folder, "PATH": folder},
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
        self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
