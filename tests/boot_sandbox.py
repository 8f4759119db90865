"""A machine's program as the process that it is: a sandbox for its root, programs on its PATH that
behave as docker, apt, systemd, the aws command and NVIDIA's do, and servers on loopback.

What runs is the one text that goes out to machines, not the modules that it is made of."""

from __future__ import annotations

import base64
import fcntl
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from forge.bundle import bundle
from forge.parts.knowledge.boot_marks import BootState, boot_state

ROOT = Path(__file__).resolve().parents[1]
IMAGE = "vllm/vllm-tpu@sha256:" + "ab" * 32
TOKEN = "hf_" + "CanaryOfTheHub0815"
PLAIN_TOKEN = "canary-without-a-shape"
ACCESS = "ya29.CanaryOfTheMachine0815"
META = "/computeMetadata/v1/instance"
WEIGHTS_LINE = "INFO [tpu_runner.py:1] Starting to load model google/gemma-4-E2B-it"
COMPILE_LINE = "INFO [compilation.py:1] Precompile all the subgraphs"
PATIENCE_S = 30.0
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
"""


@functools.cache
def program_text(name: str) -> str:
    """A machine's program as a rig carries it, in one file."""
    return bundle(f"forge.programs.{name}", ROOT).render("#!/usr/bin/env python3\n", contents=True)


@functools.cache
def oldest_python() -> str:
    """Python 3.10, the oldest that a machine may have, or else the one that runs this."""
    name = "python3.10"
    folders = sorted(Path.home().glob(f".pyenv/versions/3.10*/bin/{name}"))
    for python in filter(None, [shutil.which(name), *map(str, folders)]):
        if not subprocess.run([python, "--version"], capture_output=True).returncode:
            return python  # a name on PATH may have no Python behind it
    return sys.executable


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
    fault = world["faults"].get(" ".join([name, *argv[: name != "nvidia-smi"]]), [])
    said = fault.pop(0) if fault else ""
    hangs = world.get("hangs") in [name, *argv[:1]]
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
    elif word == "info":
        print(json.dumps(world["runtimes"]))
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
elif name == "aws" and argv[:2] == ["secretsmanager", "get-secret-value"]:
    given = dict(zip(argv, argv[1:]))
    with World() as world:
        secret = world["secrets"].get(given["--region"] + "/" + given["--secret-id"])
    if given["--query"] != "SecretString" or given["--output"] != "text":
        fail("aws: error: argument --query: not what this stub knows", 252)
    if secret is None:
        fail("\nAn error occurred (ResourceNotFoundException) when calling the GetSecretValue "
             "operation: Secrets Manager can't find the specified secret.", 254)
    print(secret)
elif name == "aws" and argv[:2] != ["s3", "sync"]:  # a copy succeeds in silence
    fail("aws: error: argument command: Invalid choice", 252)
elif name == "nvidia-smi":
    with World() as world:
        print("\n".join(world["gpus"]) if argv else world["smi"])
elif name == "nvcc":
    print("nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.8, V12.8.93")
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


class Sandbox(unittest.TestCase):
    """An empty machine with docker, and a world around it that lets everything succeed.

    A cloud's own class says which `program` runs, the `phases` of its boot, and how a document gets
    to it (`give`)."""

    program = "boot"
    phases: tuple[str, ...] = ()
    programs: tuple[str, ...] = ("docker", "systemctl", "shutdown")
    python = oldest_python()
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
        for name in self.programs:
            (self.bin / name).symlink_to(stub)
        self.text = program_text(self.program)  # what the acts bring
        self.file = self.folder / "sent" / self.program
        self.file.parent.mkdir()
        self.file.write_text(self.text)
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
        """What the machine gets as its boot document from now on: an object, or any text."""
        raise NotImplementedError

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
            "GEMMA4_MINUTE_S": str(self.minute_s),
            **more,
        }

    def start(self, *argv: str, file: Path | None = None, **more: str) -> subprocess.Popen[str]:
        """The program under way; it is ended with the test."""
        process = subprocess.Popen(
            [self.python, str(file or self.file), *argv],
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
        """An act as it comes: the program on standard input, its data in base64url."""
        data = base64.urlsafe_b64encode(json.dumps(given).encode()).decode().rstrip("=")
        return self.send(word, data)

    def send(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, "-", *argv],
            env=self.environment(),
            input=self.text,
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
        return self.state((self.root / "dev" / "console").read_text()).failed

    def state(self, text: str = "") -> BootState:
        """What the log, or this text, says of the latest boot."""
        return boot_state(text or self.log(), self.phases)

    def assert_watched(self) -> None:
        """The watch is installed and was started: a broken boot still ends."""
        self.assertTrue(self.ran("systemctl", "enable", "--now", "gemma4-idle.service"))
        installed = self.root / "var/lib/gemma4/boot.py"
        self.assertEqual(installed.read_bytes(), self.file.read_bytes())

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


SECRET = "/v1/projects/fake-proj/secrets/hf-token/versions/latest:access"


def google_error(status: int, message: str) -> tuple[int, str]:
    """A refusal in the form of Google's APIs."""
    return status, json.dumps({"error": {"code": status, "message": message}})


def secret_answer(token: str) -> tuple[int, str]:
    data = base64.b64encode(token.encode()).decode()
    return 200, json.dumps({"name": "n", "payload": {"data": data}})


class GoogleSandbox(Sandbox):
    """A machine with an agent that brings it the document and runs the program."""

    program = "boot"
    phases = ("docker", "image", "token", "weights", "compile", "ready")
    programs = (*Sandbox.programs, "gcloud")

    def setUp(self) -> None:
        super().setUp()
        access = {"access_token": ACCESS, "expires_in": 3599, "token_type": "Bearer"}
        account = f"GET {META}/service-accounts/default/token"
        self.cloud.answers[account] = (200, json.dumps(access))
        self.cloud.answers[f"GET {SECRET}"] = secret_answer(TOKEN)

    def give(self, document: Any) -> None:
        text = document if isinstance(document, str) else json.dumps(document)
        self.cloud.answers[f"GET {META}/attributes/gemma4-boot"] = (200, text)

    def environment(self, **more: str) -> dict[str, str]:
        own = {"GCE_METADATA_HOST": self.cloud.host, "GEMMA4_SECRETS_URL": self.cloud.base}
        return super().environment(**{**own, **more})
